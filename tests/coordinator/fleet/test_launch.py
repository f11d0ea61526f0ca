"""Tests what a run does when a service that it started dies."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.errors import Reason, Unavailable
from services.common.forks import Forks
from services.coordinator.fleet import launch as launching
from services.coordinator.fleet import running
from services.coordinator.fleet.launch import Addresses, Child, Fleet, launch
from services.coordinator.runs.run import Restarts
from tests.common.test_forks import TOY, seen
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S, raises, until


@pytest.mark.parametrize(
    ("resume", "saved", "goes_on"),
    [
        ("auto", True, True),
        ("must", True, True),
        ("auto", False, False),
        ("elsewhere/step-000001", True, True),
        ("never", True, False),
    ],
)
async def test_the_error_says_whether_the_same_command_goes_on(
    tmp_path: Path, resume: str, saved: bool, goes_on: bool
) -> None:
    config = make_config(runs_dir=tmp_path, resume=resume, restart={"max": 0})
    checkpoint = config.run_dir / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    if saved:
        (checkpoint / "manifest.json").write_text("{}")
    async with launch(config, Addresses(rollout=("127.0.0.1:1",), trainer="127.0.0.1:1")) as fleet:
        (reward,) = fleet.children
        os.kill(reward.process.pid, signal.SIGKILL)
        with raises(Unavailable, reason=Reason.SERVICE_DIED) as caught:
            await fleet.watch()
    assert ("run the same command again to resume from the newest checkpoint" in caught.value.message) is goes_on
    assert str(config.run_dir / "logs" / "reward.log") in caught.value.message
    assert "when memory runs out" in caught.value.message and "lower reward.max_memory_gib" in caught.value.message


async def test_a_reward_service_that_dies_is_started_again_at_its_address(tmp_path: Path) -> None:
    config = make_config(runs_dir=tmp_path, restart={"max": 1})
    async with launch(config, Addresses(rollout=("127.0.0.1:1",), trainer="127.0.0.1:1")) as fleet:
        (reward,) = fleet.children
        watching = asyncio.create_task(fleet.watch())
        first = reward.process.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: reward.process.pid != first)
        os.kill(reward.process.pid, signal.SIGKILL)
        with raises(Unavailable, reason=Reason.SERVICE_DIED) as caught:
            await watching
    assert caught.value.metadata["service"] == "reward"


async def test_what_begins_again_has_new_trainers_and_keeps_what_runs(tmp_path: Path) -> None:
    config = make_config(runs_dir=tmp_path)
    async with launch(config, Addresses(rollout=("127.0.0.1:1",), trainer="127.0.0.1:1")) as fleet:
        (reward,) = fleet.children
        first = reward.process.pid
        await fleet.start_again(("127.0.0.1:2",), keeps_trainers=False, timeout_s=PATIENCE_S)
        assert (reward.process.pid, fleet.addresses.rollout) == (first, ("127.0.0.1:2",))
        reward.restarts = None  # as a trainer's
        await fleet.start_again((), keeps_trainers=True, timeout_s=PATIENCE_S)
        assert reward.process.pid == first
        await fleet.start_again((), keeps_trainers=False, timeout_s=PATIENCE_S)
        second = reward.process.pid
        assert second != first
        reward.restarts = Restarts(config.restart)
        os.kill(second, signal.SIGKILL)
        await reward.process.wait()
        await fleet.start_again((), keeps_trainers=True, timeout_s=PATIENCE_S)
        assert (reward.is_running, fleet.addresses.rollout) == (True, ("127.0.0.1:2",))
        assert reward.process.pid != second


@asynccontextmanager
async def forked_trainer(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str = "trainer"
) -> AsyncIterator[tuple[Fleet, Child]]:
    """Yields a fleet whose only child is forked and runs."""
    monkeypatch.setattr(launching, "FORKABLE", (TOY,))
    child = Child(name, [sys.executable, "-m", TOY, "wait"], directory / "log")
    with Forks() as forks:
        fleet = Fleet(Addresses(), [child], forks)
        await fleet.start()
        await child.starting
        yield fleet, child


@pytest.mark.parametrize("num_chars", [0, 60])
async def test_the_temporary_files_of_a_killed_replica_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_chars: int
) -> None:
    """The coordinator removes what the replica made, unless the paths of sockets there would be too long."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as short:
        at = Path(short) / ("d" * num_chars)
        at.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(at))
        monkeypatch.setattr(tempfile, "tempdir", None)
        async with forked_trainer(tmp_path, monkeypatch, "rollout-0") as (fleet, child):
            for log_path in (child.log_path, tmp_path / "again"):
                await until(lambda at=log_path: at.exists() and at.read_text().endswith("\n"))
                made = Path(seen(log_path)["made"])
                assert made.is_dir() and made.is_relative_to(at) and (made.parent == at) == bool(num_chars)
                os.kill(child.process.pid, signal.SIGKILL)
                assert await child.process.wait() == -signal.SIGKILL
                child.log_path = tmp_path / "again"
                await fleet.start_again((), keeps_trainers=True, timeout_s=PATIENCE_S)
                assert made.exists() == bool(num_chars)
            await child.end()
            assert bool([*at.iterdir()]) == bool(num_chars)


async def test_forks_that_begin_again_run_before_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forked_trainer(tmp_path, monkeypatch) as (fleet, child):
        first = child.process.pid
        await fleet.start_again((), keeps_trainers=False, timeout_s=PATIENCE_S)
        assert child.is_running and child.process.pid != first
        await child.end()


async def test_imports_that_hang_are_no_reason_to_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forked_trainer(tmp_path, monkeypatch) as (fleet, child):
        await until(lambda: child.log_path.exists() and child.log_path.read_text().endswith("\n"))
        os.kill(seen(child.log_path)["imported_in"], signal.SIGSTOP)
        child.process.end(0)  # which nobody is left to tell
        with raises(Unavailable) as caught:
            async with asyncio.timeout(PATIENCE_S):
                await fleet.start_again((), keeps_trainers=False, timeout_s=0.1)
        assert "trainer: the packages were not imported within 0.1 s" in caught.value.message


async def test_a_fork_whose_parent_is_stopped_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_GRACE_S", 0.1)
    async with forked_trainer(tmp_path, monkeypatch) as (_, child):
        await until(lambda: child.log_path.exists() and child.log_path.read_text().endswith("\n"))
        os.kill(seen(child.log_path)["imported_in"], signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            await child.end()
        assert child.process.returncode == -signal.SIGKILL


async def test_without_a_started_service_nobody_waits_for_its_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_EXIT_ERROR_TIMEOUT_S", 10 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        with raises(Unavailable):
            async with running.unless_one_dies(Fleet(Addresses(), [], Forks())):
                raise Unavailable("gone")


async def test_trainers_that_are_started_together_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_started(child: Child, forks: Forks) -> None:
        threads[child.name] = child.command[child.command.index("--threads-per-rank") + 1]

    threads: dict[str, str] = {}
    monkeypatch.setattr(Child, "start", not_started)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    critic = {"deployment": "own", "num_ranks": 1}
    config = make_config(runs_dir=tmp_path, trainer={"num_ranks": 3}, advantage={"kind": "gae"}, critic=critic)
    async with launch(config, Addresses(rollout=("127.0.0.1:1",), reward=("127.0.0.1:1",))):
        await until(lambda: threads == {"trainer": "2", "critic": "2"})
    threads.clear()
    alone = config.model_copy(update={"critic": None, "advantage": make_config().advantage})  # like a replay's config
    async with launch(alone, Addresses(), services=["trainer"], sharing=config):
        await until(lambda: threads == {"trainer": "2"})
