"""Tests that services on two hosts (network namespaces) train over mTLS with the same numbers as on loopback."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.coordinator.cli.main import app
from tests.e2e.lockstep_command import LOCKSTEP, RUN_S, make_workspace, numbers, until_it_listens
from tests.e2e.namespaces import Host, received_bytes, two_hosts
from tests.support import running

COORDINATOR, TRAINER, REWARD, ROLLOUT, TORCHRUN = 7000, 7001, 7003, 7002, 29500
NUM_STEPS = 1
pytestmark = pytest.mark.long


def services(first: Host, second: Host) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the command line of each service, in the order in which they are started.

    The coordinator, the reward service and a trainer rank are on the first host, the replica and a trainer rank on the
    second.
    """

    def serve(host: Host, service: str, port: int, *arguments: str) -> list[str]:
        command = (sys.executable, "-m", f"services.{service}", "--listen", f"{host.address}:{port}")
        return host.command(*command, "--tls", f"certs/{service.partition('.')[0]}", *arguments)

    yield "coordinator", serve(first, "coordinator.daemon", COORDINATOR, "--runs-dir", "runs")
    yield "reward", serve(first, "reward", REWARD)
    yield "rollout", serve(second, "rollout", ROLLOUT)
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    for rank, host in ((1, second), (0, first)):  # they are ended in reverse: rank 1 ends once rank 0 has
        # Each rank has as many threads as on loopback, where two share the cores, because sums may depend on them.
        own = ",".join(map(str, cores[-half:] if rank else cores[:half]))
        torchrun = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        torchrun += ["--master-addr", first.address, "--master-port", str(TORCHRUN)]
        command = (
            "taskset",
            "--cpu-list",
            own,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *torchrun,
            "-m",
            "services.trainer",
        )
        # It listens on all interfaces, and learns from the coordinator by which of them others reach it.
        yield f"trainer-{rank}", host.command(*command, "--listen", f"0.0.0.0:{TRAINER}", "--tls", "certs/trainer")


def make_certificates(first: Host, second: Host) -> None:
    """Issues certificates, below certs/ here, for the address at which each service is called and for the operator."""
    hosts = {"coordinator": first, "reward": first, "trainer": first, "rollout": second, "operator": second}
    for arguments in (
        ("init",),
        *(("issue", role, "--host", host.address, "--out", f"certs/{role}") for role, host in hosts.items()),
    ):
        made = CliRunner().invoke(app, ["certs", *arguments], catch_exceptions=False)
        assert made.exit_code == 0, made.output


def doctor(host: Host, options: list[str]) -> str:
    """Returns what `lockstep doctor` says on `host`, a line for each check."""
    command = host.command("env", "COLUMNS=400", LOCKSTEP, "doctor", *options, "--tls", "certs/coordinator")
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False).stdout


@pytest.fixture(scope="module")
def run_there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Provides the workspace and output of a run on two hosts, and the number of bytes that the second one received."""
    workspace = make_workspace(tmp_path_factory.mktemp("namespaces"))
    with two_hosts() as (first, second), ExitStack() as stack, chdir(workspace):
        make_certificates(first, second)
        for name, command in services(first, second):
            stack.enter_context(running(command, workspace / f"{name}.log"))
        for name in ("coordinator", "trainer-0", "rollout"):
            until_it_listens(workspace / f"{name}.log")
        addresses = {
            "coordinator": f"{first.address}:{COORDINATOR}",
            "reward": f"{first.address}:{REWARD}",
            "trainer": f"{first.address}:{TRAINER}",
            "rollout": f"{second.address}:{ROLLOUT}",
        }
        options = [f"--{name}={address}" for name, address in addresses.items()]
        (workspace / "doctor.out").write_text(doctor(first, options[2:]))
        before = received_bytes(second)
        command = second.command(
            LOCKSTEP, "run", "run.yaml", f"num_steps={NUM_STEPS}", *options, "--tls", "certs/operator"
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
        logs = {path.name: path.read_text()[-3000:] for path in workspace.rglob("*.log")}
        assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *map(str, logs.items())])
        return workspace, done.stdout, received_bytes(second) - before


def test_it_trains_over_the_network_with_the_numbers_of_loopback(run_there: tuple[Path, str, int], undisturbed: Path):
    workspace, output, num_bytes = run_there
    assert f"{NUM_STEPS} step done" in output
    model = (workspace / "model" / "model.safetensors").stat().st_size
    assert num_bytes > (1 + NUM_STEPS) * model  # each publication, and more
    there, here = numbers(workspace), numbers(undisturbed)
    kept = [line for line in there if line["step"] < NUM_STEPS or "train/loss" in line]
    assert [line["step"] for line in kept] == [0, 1]
    assert kept == here[: len(kept)]


def test_doctor_broadcasts_from_one_host_to_the_other(run_there: tuple[Path, str, int]):
    said = (run_there[0] / "doctor.out").read_text()
    (line,) = [line for line in said.splitlines() if "broadcast" in line]
    assert re.search(r"64 MiB in .* GB/s, by gloo from veth0 10\.177\.0\.1 to veth0 10\.177\.0\.2 *│ ok", line), said
