"""Tests that a run restarts a trainer that dies in an update, resumes, and ends with the same files."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from services.common.config.run import Config
from services.common.forks import Forks
from services.coordinator.fleet.launch import Child
from services.coordinator.observe.frontend import TerminalFrontend
from services.coordinator.rl.session import run_session
from services.coordinator.runs.record import batch_path
from tests.coordinator.daemon.harness import fake_services, run_settings
from tests.coordinator.runs.killing import metrics_lines

NUM_STEPS = 3


@pytest.fixture
def started_trainers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Starts toy trainers in place of real ones, of which the first dies in its second update. Returns their names."""
    start, started = Child.start, list[str]()

    async def start_toy(child: Child, forks: Forks) -> None:
        python, _, _, *flags = child.command
        toy = ["-m", "tests.coordinator.fleet.toy_trainer", "--die-in", "1", "--marker", str(tmp_path / "died")]
        child.command = [python, *toy, *flags]
        started.append(child.name)
        await start(child, forks)

    monkeypatch.setattr(Child, "start", start_toy)
    return started


async def test_the_run_resumes_by_itself(tmp_path: Path, started_trainers: list[str]) -> None:
    directories: list[Path] = []
    async with fake_services() as fakes:
        for name, given in (("disturbed", replace(fakes.given, trainer="")), ("calm", fakes.given)):
            config = Config(**run_settings(tmp_path, name=name, num_steps=NUM_STEPS, runs_dir=tmp_path / "runs"))
            outcome = await run_session(config, given, TerminalFrontend(Console(quiet=True)))
            assert (outcome.version, started_trainers) == (NUM_STEPS, ["trainer"] * 2)
            directories.append(config.run_dir)
    disturbed, calm = directories
    assert metrics_lines(disturbed) == metrics_lines(calm)
    for version in range(NUM_STEPS):
        assert pq.read_table(batch_path(disturbed, version)).equals(pq.read_table(batch_path(calm, version)))
