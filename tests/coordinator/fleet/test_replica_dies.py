"""Tests that a run restarts its only replica when it dies, waits for it, and ends with the same files."""

import functools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp, SamplingParams

from services.common.errors import DeadlineExceeded, LockstepError, Reason, Unavailable
from services.common.forks import Forks
from services.coordinator.clients.rollout import Rollout
from services.coordinator.fleet.launch import Child
from services.coordinator.runs.record import batch_path
from services.coordinator.verify.session import verify
from tests.coordinator.fake_services import make_config, make_prompt, replicas
from tests.coordinator.runs.killing import CountingRank, make_run, metrics_lines, surviving_services
from tests.support import raises
from tests.trainer.harness_processes import marked

NUM_STEPS = 3
STAMP = PolicyStamp(version=3, digest="d" * 32)
Starts = Callable[[str], list[str]]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    """Provides a function that makes the first toy replica die in a method, and returns the names of those started."""

    def dying_in(method: str) -> list[str]:
        start, started = Child.start, list[str]()

        async def start_toy(child: Child, forks: Forks) -> None:
            python, _, _, *flags = child.command
            toy = ["-m", "tests.coordinator.fleet.toy_replica", "--die-in", method, "--version", "1"]
            child.command = [python, *toy, "--marker", str(tmp_path / "died"), *flags]
            started.append(child.name)
            await start(child, forks)

        monkeypatch.setattr(Child, "start", start_toy)
        return started

    return dying_in


def kill_while_training(monkeypatch: pytest.MonkeyPatch, marker: Path) -> None:
    """Makes the trainer kill the replica in its second update."""
    apply_batch = CountingRank.apply_batch

    @functools.wraps(apply_batch)
    def killing(self: CountingRank, *, version: int, **arguments: Any) -> Any:
        if version == 1 and not marker.exists():
            marker.touch()
            os.kill(int(marker.with_suffix(".pid").read_text()), signal.SIGKILL)
        return apply_batch(self, version=version, **arguments)

    monkeypatch.setattr(CountingRank, "apply_batch", killing)


async def calm_run(directory: Path, **changes: Any) -> Path:
    """Runs with a replica that lives, and returns the run's directory."""
    return await run(directory / "calm", starts_replica=False, **changes)


async def run(directory: Path, *, starts_replica: bool = True, **changes: Any) -> Path:
    directory.mkdir()
    config = make_run(directory, NUM_STEPS, **changes)
    async with surviving_services() as services:
        services.given = replace(services.given, rollout=()) if starts_replica else services.given
        assert (await services.run(config)).version == NUM_STEPS
    return config.run_dir


def assert_same(disturbed: Path, calm: Path) -> None:
    assert metrics_lines(disturbed) == metrics_lines(calm)
    for version in range(NUM_STEPS):
        assert pq.read_table(batch_path(disturbed, version)).equals(pq.read_table(batch_path(calm, version)))


@pytest_asyncio.fixture(scope="module")
async def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return await calm_run(tmp_path_factory.mktemp("calm"))


METHODS = ["Generate", "ReceiveWeights", "CommitWeights", "Train"]


@pytest.mark.parametrize("method", marked(METHODS, long=["ReceiveWeights", "CommitWeights"]))
async def test_the_run_goes_on_with_the_restarted_replica(
    tmp_path: Path,
    starts: Starts,
    calm: Path,
    method: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = starts(method)
    if method == "Train":
        kill_while_training(monkeypatch, tmp_path / "died")
    disturbed = await run(tmp_path / "disturbed")
    assert started == ["rollout-0"] * 2
    assert "starting again and resuming" not in caplog.text
    assert_same(disturbed, calm)
    assert verify(disturbed).violation == ""


async def test_a_run_with_a_lag_resumes_by_itself(tmp_path: Path, starts: Starts) -> None:
    lag = {"trainer": {"lag": {"versions": 1}, "loss": {"old_logprobs": "engine"}}}
    started, calm = starts("Generate"), await calm_run(tmp_path, **lag)
    disturbed = await run(tmp_path / "disturbed", **lag)
    assert started[:2] == ["rollout-0"] * 2
    assert_same(disturbed, calm)
    assert verify(disturbed).violation == ""


async def test_without_a_restart_left_the_run_ends(tmp_path: Path, starts: Starts) -> None:
    started = starts("Generate")
    with raises(LockstepError, reason=Reason.SERVICE_DIED) as caught:
        await run(tmp_path / "disturbed", restart={"max": 0})
    assert (caught.value.metadata["service"], started) == ("rollout-0", ["rollout-0"])


@pytest.mark.parametrize(("max_restarts", "num_closed"), [(2, 2), (0, 0)])
async def test_an_engine_that_always_hangs_is_not_awaited_forever(max_restarts: int, num_closed: int) -> None:
    config = make_config(restart={"max": max_restarts})
    async with replicas(1) as (slow,):
        rollout = Rollout([slow.address], config, started=[slow.address])
        await rollout.open("run", ModelCard())
        slow.error["Generate"] = DeadlineExceeded("no answer in 3600 s")

        async def publish_again() -> None:
            await rollout.replicas[0].commit(STAMP)

        rollout.publish_again = publish_again
        await publish_again()
        with raises(Unavailable, reason=Reason.NO_REPLICA):
            await rollout.generate(0, make_prompt(0), [0], SamplingParams(temperature=1, max_tokens=10), STAMP)
        assert len(slow.committed) == 1 + num_closed
        await rollout.close()
