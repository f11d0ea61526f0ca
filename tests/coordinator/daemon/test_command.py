"""Tests `lockstep` with a daemon in its own process: detach, reattach, stop the daemon, resume with another."""

import asyncio
import contextlib
import signal
import sys
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1 import coordinator_pb2_grpc
from lockstep.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer as CoordinatorService

from services.common.rpc.client import Client
from tests.coordinator.daemon.harness import Fakes, fake_services, run_settings
from tests.support import PATIENCE_S, ROOT, free_port, until


class Command:
    """A running `lockstep` command in `directory`, with its output."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path):
        self.process, self._output = process, output

    @classmethod
    async def start(cls, directory: Path, *arguments: str) -> "Command":
        output = directory / f"{'-'.join(arguments[:2])}-{len(list(directory.iterdir()))}.out"
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.coordinator", *arguments), cwd=directory, stdout=file, stderr=file
            )
        return cls(process, output)

    @property
    def output(self) -> str:
        return self._output.read_text()

    async def end(self) -> tuple[int, str]:
        """Waits for the end of the command. Returns its exit code and output."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait(), self.output

    async def until(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.output:
                assert self.process.returncode is None, self.output
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def served(directory: Path, address: str) -> AsyncIterator[Command]:
    """Yields a daemon that is ready; kills it afterwards if it still runs."""
    daemon = await Command.start(directory, "coordinator", "serve", "--listen", address)
    client = Client(address, coordinator_pb2_grpc.CoordinatorServiceStub)
    try:
        info = await client.call(
            CoordinatorService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S, wait_for_ready=True
        )
        assert (info.info.service, info.runs_dir) == ("coordinator", str(directory / "runs"))
        yield daemon
    finally:
        await client.close()
        if daemon.process.returncode is None:
            daemon.process.kill()
            await daemon.process.wait()


async def run(directory: Path, at: list[str], fakes: Fakes) -> Command:
    addresses = fakes.given
    given = (f"--trainer={addresses.trainer}", f"--reward={addresses.reward[0]}", f"--rollout={addresses.rollout[0]}")
    return await Command.start(directory, "run", "run.yaml", *at, *given)


@pytest.mark.slow
async def test_a_run_outlives_its_watchers_and_its_daemon(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_settings(tmp_path)))
    at = ["--coordinator", f"127.0.0.1:{free_port()}"]
    async with fake_services() as fakes:
        fakes.trainer.hold_after(1)
        async with served(tmp_path, at[1]) as daemon:
            first = await run(tmp_path, at, fakes)
            await first.until("2.000")  # the row of the first step
            first.process.send_signal(signal.SIGINT)
            code, output = await first.end()
            assert code == 130
            assert f"run run on coordinator {at[1]}, in {tmp_path}/runs/run on its host" in output
            assert f"detached; the run continues\n  reattach: lockstep watch run {' '.join(at)}" in output

            status, watch, log = [
                await Command.start(tmp_path, *arguments, *at)
                for arguments in (["status"], ["watch", "run"], ["logs", "run", "--follow"])
            ]
            code, output = await status.end()
            assert code == 0 and "running" in output and "1 of 3" in output
            await watch.until("2.000")
            await log.until("run run-")
            await until(fakes.trainer.training.is_set)  # the second step
            daemon.process.terminate()
            await daemon.until("stopping 1 run after the current step")
            fakes.trainer.permits.release()
            assert (await daemon.end())[0] == 0
            for command, said, expected in ((watch, "run run was stopped", 3), (log, "opening trainer", 0)):
                code, output = await command.end()
                assert code == expected and said in output, output
        assert "Stopped: 2 of 3 steps done. Run the same command again to resume." in watch.output
        fakes.trainer.let_go()
        async with served(tmp_path, at[1]):
            code, output = await (await run(tmp_path, at, fakes)).end()
            assert code == 0 and "3 steps done" in output, output
            rows = [line.split()[0] for line in output.splitlines() if " 2.000 " in line]  # the norm of every step
            assert rows == ["1/3", "2/3", "3/3"]
            code, output = await (await Command.start(tmp_path, "stop", "run", *at)).end()
            assert code == 0 and "run run is finished, with 3 of 3 steps done" in output
            code, output = await (await Command.start(tmp_path, "watch", "walk", *at)).end()
            assert code == 2 and "there is no run walk" in output


def test_each_service_has_a_command_of_its_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {f"lockstep-{service}" for service in ("coordinator", "reward", "rollout", "trainer")} < set(
        project["scripts"]
    )
    for name, target in project["scripts"].items():
        assert callable(EntryPoint(name, target, "console_scripts").load())
