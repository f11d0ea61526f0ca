"""Tests how `lockstep run` ends, as a process of its own with fake services: outputs, disks and signals that fail."""

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from services.common.errors import PreconditionFailed, Reason
from services.coordinator.observe.report.page import gather
from tests.coordinator.daemon.harness import NUM_STEPS, Fakes, fake_services, run_settings
from tests.small_disk import small_disk
from tests.support import PATIENCE_S


@pytest_asyncio.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with fake_services() as services:
        yield services


class Run:
    """A running `lockstep run` in `directory`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path):
        self.process, self.run_dir = process, directory / "runs" / "run"

    @classmethod
    async def start(
        cls, directory: Path, fakes: Fakes, *overrides: str, output: int = asyncio.subprocess.PIPE
    ) -> "Run":
        (directory / "run.yaml").write_text(yaml.safe_dump(run_settings(directory)))
        given = fakes.given
        addresses = ("--trainer", given.trainer, "--reward", given.reward[0], "--rollout", given.rollout[0])
        command = (sys.executable, "-m", "services.coordinator", "run", "run.yaml", *overrides, *addresses)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=directory, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.PIPE
        )
        return cls(process, directory)

    async def end(self) -> tuple[int, list[str]]:
        """Returns the exit code and the lines on stderr that are not gRPC's."""
        async with asyncio.timeout(PATIENCE_S):
            assert self.process.stderr
            errors = (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait(), [line for line in errors if not line.startswith(("I", "E"))]

    @property
    def steps(self) -> list[int]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [row["step"] for row in map(json.loads, lines) if "time/step_s" in row]


ALL_STEPS = list(range(1, NUM_STEPS + 1))


async def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, fakes: Fakes):
    fakes.trainer.hold_after(0)
    run = await Run.start(tmp_path, fakes)
    assert run.process.stdout
    for _ in range(2):  # as `head -2` does
        await asyncio.wait_for(run.process.stdout.readline(), PATIENCE_S)
    run.process.stdout._transport.close()  # type: ignore[attr-defined]
    fakes.trainer.let_go()
    code, errors = await run.end()
    assert (code, run.steps) == (0, ALL_STEPS)
    (line,) = errors
    assert line.startswith("lockstep: warning: <stdout> cannot be written: Broken pipe; the run goes on; its log is ")


async def test_a_run_outlives_a_full_output(tmp_path: Path, fakes: Fakes):
    with open("/dev/full", "wb") as full:
        run = await Run.start(tmp_path, fakes, output=full.fileno())
    code, errors = await run.end()
    assert (code, run.steps, len(errors)) == (0, ALL_STEPS, 1)
    assert "No space left on device" in errors[0]


async def test_a_signal_while_opening_ends_with_a_word(tmp_path: Path, fakes: Fakes):
    fakes.trainer.may_open.clear()
    run = await Run.start(tmp_path, fakes)
    assert run.process.stdout
    while b"opening" not in await asyncio.wait_for(run.process.stdout.readline(), PATIENCE_S):
        pass
    run.process.send_signal(signal.SIGTERM)
    assert await run.end() == (130, ["lockstep: stopped"])


async def test_the_last_line_has_the_reason_and_the_report_says_failed(tmp_path: Path, fakes: Fakes):
    fakes.trainer.error = PreconditionFailed("too far apart", reason=Reason.LOGPROB_DIFF)
    run = await Run.start(tmp_path, fakes)
    code, errors = await run.end()
    assert (code, errors[-1]) == (2, "lockstep: error: LOGPROB_DIFF: too far apart")
    page = gather(run.run_dir)
    assert page["state"] == "failed"
    assert ("error", "LOGPROB_DIFF: too far apart") in page["facts"]
    fakes.trainer.error = None
    assert (await (await Run.start(tmp_path, fakes)).end())[0] == 0
    page = gather(run.run_dir)
    assert page["state"] == "done" and "error" not in dict(page["facts"])
    logged = (run.run_dir / "logs" / "coordinator.log").read_text()
    failed = ("training from", "failed: LOGPROB_DIFF: too far apart", "session failed after step 0")
    assert [text for text in (*failed, f"session finished after step {NUM_STEPS}") if text not in logged] == []


async def test_only_the_owner_can_read_a_run(tmp_path: Path, fakes: Fakes):
    run = await Run.start(tmp_path, fakes)
    assert (await run.end())[0] == 0
    written = [run.run_dir, *run.run_dir.rglob("*")]
    served = {run.run_dir / "checkpoints", run.run_dir / "model"}  # by the fake trainer, in the test's process
    own = [path for path in written if not {path, *path.parents} & served]
    assert {path.name for path in own} >= {"ledger.sqlite", "metrics.jsonl", "batches", "config.json", "logs"}
    for path in own:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


async def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path, fakes: Fakes):
    fakes.trainer.hold_after(1)
    with small_disk(tmp_path / "runs") as disk:
        run = await Run.start(tmp_path, fakes)
        await fakes.trainer.training.wait()
        disk.fill()
        fakes.trainer.let_go()
        code, errors = await run.end()
        assert code == 2 and not [line for line in errors if "Traceback" in line], errors
        assert errors[-1].startswith(f"lockstep: error: STORAGE_FAILED: {run.run_dir}/")
        assert errors[-1].endswith("free space on that disk or raise the limit, then run the same command again") or (
            errors[-1].endswith("free space on that disk, then run the same command again")
        )
        disk.free()
        code, errors = await (await Run.start(tmp_path, fakes)).end()
        assert (code, run.steps) == (0, ALL_STEPS), errors


async def test_a_directory_that_goes_during_a_run_is_one_line(tmp_path: Path, fakes: Fakes):
    fakes.trainer.hold_after(0)
    run = await Run.start(tmp_path, fakes)
    await fakes.trainer.training.wait()
    os.rename(run.run_dir, tmp_path / "aside")
    fakes.trainer.let_go()
    code, errors = await run.end()
    assert code == 2 and not [line for line in errors if "Traceback" in line], errors
    assert errors[-1].startswith(f"lockstep: error: STORAGE_FAILED: {run.run_dir}/ledger.sqlite cannot be written: ")
    os.rename(tmp_path / "aside", run.run_dir)
    code, errors = await (await Run.start(tmp_path, fakes)).end()
    assert (code, run.steps) == (0, ALL_STEPS), errors


@pytest.mark.long
async def test_a_damaged_line_does_not_block_a_resume(tmp_path: Path, fakes: Fakes):
    run = await Run.start(tmp_path, fakes)
    assert (await run.end())[0] == 0
    path = run.run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"entropy", b"entr\xffpy", 1))
    code, errors = await (await Run.start(tmp_path, fakes, f"num_steps={NUM_STEPS + 1}")).end()
    assert (code, run.steps) == (0, [*ALL_STEPS, NUM_STEPS + 1]), errors


@pytest.mark.long
async def test_a_finished_run_opens_no_service_unless_something_is_due(tmp_path: Path, fakes: Fakes):
    async def again(*overrides: str) -> tuple[bytes, int]:
        run = await Run.start(tmp_path, fakes, *overrides)
        assert run.process.stdout
        output = await asyncio.wait_for(run.process.stdout.read(), PATIENCE_S)
        assert (await run.end())[0] == 0 and run.steps == ALL_STEPS
        return output, len(fakes.trainer.closed)

    _, num_opened = await again()
    output, still_opened = await again()
    assert still_opened == num_opened
    assert output.startswith(b"run already has its 3 steps; raise num_steps or use another name\n"), output
    assert b"3 steps done. Files in" in output and b"grad norm" not in output
    exported = tmp_path / "runs" / "run" / "model"
    exported.rename(tmp_path / "model")
    assert (await again())[1] == num_opened + 1 and exported.is_dir()
    assert (await again("checkpoint.export_at_end=false"))[1] == num_opened + 1
