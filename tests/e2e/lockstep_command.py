"""Runs the `lockstep` command as a user does, and watches it from outside through its files and processes."""

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, chdir, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401 before anything in this process imports transformers without it, as the coordinator does
import yaml
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from typer.testing import CliRunner

from services.common.forks import FORKABLE
from services.common.rpc.client import Client
from services.coordinator.cli.main import app
from services.coordinator.verify.session import verify
from tests.e2e.forked.processes import Forked, start_command, start_service
from tests.support import (
    PATIENCE_S,
    SMALL_CACHE,
    descendants,
    ending,
    free_port,
    make_model,
    running,
    service_command,
    still_there,
)

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
Service = Forked | subprocess.Popen[bytes]
NUM_STEPS = 4
# A run takes a minute or two on an idle machine.
RUN_S = 1200.0
# Names of the metrics that differ between runs whose other numbers are the same.
_CLOCK = re.compile(r"time/.*|train/.*_s")
# A scorer that the test can hold: once the file `hold` is gone, a sample's reward is the share of digits in its text.
_GATE = """
import pathlib, time

def score(*, completion, **_):
    while pathlib.Path("hold").exists():
        time.sleep(0.01)
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
"""


def invoke(*arguments: object, cwd: Path, timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
    """Runs the `lockstep` command to its end, in a fork."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory) / "output", Path(directory) / "errors"
        process = start_command([*map(str, arguments)], cwd, errors, output)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


def execute(*arguments: object, cwd: Path, timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
    """Runs the `lockstep` command to its end, as a user starts it."""
    command = [LOCKSTEP, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
    )


def make_sums(directory: Path) -> None:
    """Writes `directory`/{train,test}.parquet, of 64 and 8 rows, in this process, which has imported the command."""
    options = ["--out", str(directory), "--num-train", "64", "--num-test", "8"]
    made = CliRunner().invoke(app, ["data", "arithmetic", *options], catch_exceptions=False)
    assert made.exit_code == 0, made.output


def make_workspace(directory: Path, *, kind: str = "untied", **overrides: object) -> Path:
    """Fills `directory` with model, data, scorer and run.yaml, and returns it.

    A step takes a second or two. A replica generates the 4 samples of one group at once.
    """
    make_model(directory / "model", kind)
    make_sums(directory / "data")
    (directory / "gate.py").write_text(_GATE)
    config = {
        "name": "run",
        "model": "model",
        "num_steps": NUM_STEPS,
        "data": {
            "train": "data/train.parquet",
            "eval": {"test": "data/test.parquet"},
            "prompts_per_step": 8,
            "max_prompt_tokens": 16,
        },
        "rollout": {
            "num_replicas": 2,
            "completions_per_prompt": 4,
            "max_model_len": 96,
            "max_samples": 4,
            "sampling": {"max_tokens": 32},
            "engine": SMALL_CACHE,
        },
        "trainer": {"num_ranks": 2, "max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}},
        "reward": {
            "scorers": [{"kind": "python", "path": "gate:score"}],
            "timeout_s": 300,
            "num_workers": 1,
            "on_failure": "fail",
        },
        "evaluation": {"eval_freq": 2, "max_tokens": 8},
        "checkpoint": {"save_freq": 2},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config | overrides))
    return directory


class LockstepRun:
    """Runs `lockstep run run.yaml ...` in a workspace, in a fork."""

    command = ("run", "run.yaml")

    def __init__(self, workspace: Path, *arguments: str):
        self.workspace, self.directory = workspace, workspace / "runs" / "run"
        self._output = workspace / "output"
        self._output.write_bytes(b"")
        self.process = self.start([*self.command, *arguments])

    def start(self, arguments: list[str]) -> Service:
        return start_command(arguments, self.workspace, self._output)

    def __enter__(self) -> "LockstepRun":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        below = list(self.below())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in still_there(below):
            os.kill(pid, signal.SIGKILL)
        if error is None:
            require_legal(self.directory)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def log(self) -> str:
        path = self.directory / "logs" / "coordinator.log"
        return path.read_text() if path.exists() else ""

    def ledger(self, kind: str) -> list[dict]:
        """Returns the decisions of a kind so far; `body` is flattened into the row."""
        path = self.directory / "ledger.sqlite"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=PATIENCE_S)) as database:
            try:
                rows = database.execute(
                    "SELECT seq, version, body FROM decisions WHERE kind = ? ORDER BY seq", (kind,)
                ).fetchall()
            except sqlite3.OperationalError:  # the table is about to be made
                return []
        return [{"seq": seq, "version": version, **json.loads(body)} for seq, version, body in rows]

    def has(self, kind: str, version: int) -> bool:
        return any(row["version"] == version for row in self.ledger(kind))

    def until(self, condition: Callable[[], object], what: str, *, timeout_s: float = RUN_S) -> None:
        """Waits until `condition` holds; fails if the run ends first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.output}\n{self.log}"
            time.sleep(0.02)

    def below(self) -> dict[int, str]:
        """Returns the ids and command lines of all processes that the run has started."""
        return descendants(self.process.pid)

    def services(self, service: str) -> dict[str, int]:
        """Returns the process ids of the services of a kind that the run has started, by address."""
        found = {}
        for pid, command in self.below().items():
            match = re.search(rf"-m services\.{service} .*--listen (\S+)", command)
            if match:
                found.setdefault(match[1], pid)
        return found

    def hold(self) -> None:
        """Lets no sample be scored until `release`."""
        (self.workspace / "hold").touch()

    def release(self) -> None:
        (self.workspace / "hold").unlink()

    def wait(self, timeout_s: float = RUN_S) -> int:
        """Waits for the end, and returns the exit code."""
        return self.process.wait(timeout_s)


class ExecutedRun(LockstepRun):
    """Runs it as a user does."""

    def start(self, arguments: list[str]) -> Service:
        nothing, errors = subprocess.DEVNULL, subprocess.STDOUT
        with self._output.open("wb") as output:
            return subprocess.Popen(
                [LOCKSTEP, *arguments], cwd=self.workspace, stdin=nothing, stdout=output, stderr=errors
            )


def require_legal(run_dir: Path) -> None:
    """Asserts that the record and the calls of a run that trains by reinforcement are legal, however it ended."""
    if (run_dir / "ledger.sqlite").exists() and "rollout" in json.loads((run_dir / "config.json").read_text()):
        verdict = verify(run_dir)
        assert not verdict.violation, "\n".join((verdict.violation, *verdict.lines))


def numbers(workspace: Path) -> list[dict[str, float]]:
    """Returns the lines of metrics.jsonl without times."""
    lines = (workspace / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if not _CLOCK.fullmatch(name)} for line in lines]


def weights(workspace: Path) -> dict[str, bytes]:
    """Returns the exported weights, by file."""
    directory = workspace / "runs" / "run" / "model"
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def replica_info(address: str) -> pb.GetInfoResponse:
    async def ask() -> pb.GetInfoResponse:
        client = Client(address, rollout_pb2_grpc.RolloutServiceStub)
        try:
            return await client.call(RolloutService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)
        finally:
            await client.close()

    return asyncio.run(ask())


def assert_gone(pids: Iterable[int]) -> None:
    """Asserts that `pids` is not empty and that all of them end."""
    pids = list(pids)
    assert pids
    assert not still_there(pids)


@dataclass(frozen=True)
class Lent:
    """Holds running services, by name. They run in `directory`, where each has a log, and serve their metrics."""

    addresses: dict[str, str]
    processes: dict[str, Service]
    directory: Path

    @property
    def options(self) -> list[str]:
        """Returns the options of `lockstep run` that name the services."""
        return [f"--{name.partition('-')[0]}={address}" for name, address in self.addresses.items()]

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def page(self, name: str) -> str:
        """Waits until the service listens, and returns the address, HOST:PORT, at which it serves its metrics."""
        until_it_listens(self.directory / f"{name}.log")
        (page,) = re.findall(r"metrics on http://([^/\s]+)", self.log(name))
        return page

    def metrics(self, name: str) -> bytes:
        """Returns the metrics that the service gives Prometheus."""
        return urllib.request.urlopen(f"http://{self.page(name)}/metrics", timeout=PATIENCE_S).read()


def until_it_listens(log: Path) -> None:
    """Waits until the service with this log accepts calls."""
    deadline = time.monotonic() + RUN_S
    while "listens on" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def reference(workspace: Path, lent: Lent, **settings: object) -> None:
    """Makes a run that nothing disturbs, on `lent` services and a reward service of its own.

    For each lent service, <name>.log has what it logged during the run, and <name>.{before,after}.prom its metrics
    before and after.
    """
    make_workspace(workspace, model=str(workspace / "model"), **settings)
    address = f"127.0.0.1:{free_port()}"
    with running_services({"reward": address}, workspace) as (reward,):
        for name in lent.addresses:
            (workspace / f"{name}.before.prom").write_bytes(lent.metrics(name))
        logged = {name: len(lent.log(name)) for name in lent.addresses}
        with ExecutedRun(workspace, *lent.options, f"--reward={address}") as run:
            assert run.wait() == 0, run.output
            assert not run.below()
        for name in lent.addresses:
            (workspace / f"{name}.after.prom").write_bytes(lent.metrics(name))
            (workspace / f"{name}.log").write_text(lent.log(name)[logged[name] :])
        assert reward.poll() is None, "a service that was only borrowed has ended"


@contextmanager
def running_services(addresses: dict[str, str], workspace: Path) -> Iterator[list[Service]]:
    """Runs the services of `addresses` in `workspace`, as an operator starts them, and yields their processes.

    Trainers and replicas are forks, as are those that a run starts.
    """
    with ExitStack() as stack:
        processes: list[Service] = []
        with chdir(workspace):
            for name, address in addresses.items():
                flags = ("--metrics", "127.0.0.1:0")
                command, log = service_command(name.partition("-")[0], address, *flags, num_ranks=2), f"{name}.log"
                processes.append(stack.enter_context(forked_or_running(command, workspace / log)))
        yield processes


@contextmanager
def forked_or_running(command: list[str], log: Path) -> Iterator[Service]:
    """Yields the process of a service that is ended with the block; it is a fork if it can be one."""
    _, _, module, *arguments = command
    if module not in FORKABLE:
        with running(command, log) as process:
            yield process
        return
    forked = start_service(module, arguments, log)
    with ending(forked):
        yield forked
