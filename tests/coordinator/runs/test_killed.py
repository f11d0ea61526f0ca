"""Tests that a coordinator that is killed at any point loses and doubles nothing, if its services go on."""

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from services.common.config.run import Config
from services.common.errors import PreconditionFailed, Reason
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from services.coordinator.runs.reader import LedgerReader
from services.coordinator.runs.record import batch_path
from tests.coordinator.runs.killing import (
    Deadline,
    Killed,
    Services,
    deadline,
    killed,
    make_run,
    metrics_lines,
    surviving_services,
)

__all__ = ["deadline"]
NUM_STEPS = 2
STEPS = list(range(1, NUM_STEPS + 1))
WITH_CRITIC = {"advantage": {"kind": "gae"}, "critic": {}}
_LIFE = 12  # events of the first coordinator: enough to open the services and to publish


# Two blocks of one group each, which has 10 tokens: a block ends with 9.
_STREAMED = {"trainer": {"max_tokens_per_microbatch": 16}}


_STREAM = {"send of a block", "commit", "Train"}
_MINIBATCHES = {"trainer": {**_STREAMED["trainer"], "num_minibatches": 2}}


@pytest.mark.parametrize(
    ("changes", "trains", "every"),
    [
        pytest.param({}, {"Train"}, 1, marks=pytest.mark.long),
        pytest.param(_STREAMED, _STREAM, 1, marks=pytest.mark.long),
        (_STREAMED, _STREAM, 7),
        pytest.param(_MINIBATCHES, _STREAM, 1, marks=pytest.mark.long),
    ],
)
async def test_wherever_it_is_killed_the_record_becomes_that_of_an_undisturbed_run(
    tmp_path: Path, deadline: Deadline, changes: dict[str, Any], trains: set[str], every: int
):
    """Kills it at all events of the run, or at every seventh."""
    async with surviving_services() as services:
        undisturbed, events = await _undisturbed(services, tmp_path / "undisturbed", deadline, **changes)
        blocks = [*services.rank.blocks]
        assert {"batch recorded", "SendWeights", "SaveCheckpoint", "line 2", "ledger evaluated 2"} | trains <= {*events}
        for num_events in range(1, len(events) + 1, every):
            where = f"killed after {num_events} events: {events[:num_events][-3:]}"
            config = _made(tmp_path / f"killed-{num_events}", **changes)
            services.rank.trained.clear()
            services.rank.blocks.clear()
            deadline.restart(num_events)
            await _run_until_killed(services, config)
            deadline.restart()
            outcome = await services.run(config)
            assert (outcome.version, services.rank.trained) == (NUM_STEPS, [0, 1]), where
            assert services.rank.blocks == blocks, where
            assert metrics_lines(config.run_dir) == undisturbed, where
            assert _record(config.run_dir) == (STEPS, [0, *STEPS], STEPS), where


@pytest.mark.parametrize(
    "models", [pytest.param({}, marks=pytest.mark.long), WITH_CRITIC], ids=["policy", "policy and critic"]
)
async def test_it_may_be_killed_again_and_again(models: dict[str, Any], tmp_path: Path, deadline: Deadline):
    async with surviving_services() as services:
        undisturbed, events = await _undisturbed(services, tmp_path / "undisturbed", deadline, **models)
        config = _made(tmp_path / "killed", **models)
        services.rank.trained.clear()
        services.rank.critic_trained.clear()
        num_lives = 1
        deadline.restart(_LIFE)
        while await _run_until_killed(services, config):
            num_lives += 1
            assert num_lives < len(events)
            deadline.restart(_LIFE + num_lives)
        assert num_lives > 2
        assert services.rank.trained == [0, 1]
        assert services.rank.critic_trained == ([0, 1] if models else [])
        assert metrics_lines(config.run_dir) == undisturbed
        assert _record(config.run_dir) == (STEPS, [0, *STEPS], STEPS)


async def test_a_batch_that_another_coordinator_has_trained_on_is_not_taken_for_the_recorded_one(
    tmp_path: Path, deadline: Deadline
):
    """Tests that a recorded batch is not finished if the trainer has applied another one.

    This happens if a host is frozen until its lock expires, and goes on with a batch of its own after another
    coordinator has resumed its run.
    """
    async with surviving_services() as services:
        _, events = await _undisturbed(services, tmp_path / "undisturbed", deadline)
        config = _made(tmp_path / "killed")
        deadline.restart(events.index("Train") + 1)
        assert await _run_until_killed(services, config)
        deadline.restart()
        _record_another_batch(config.run_dir)
        with pytest.raises(PreconditionFailed, match="restart the trainer") as caught:
            await services.run(config)
        assert caught.value.reason is Reason.REPLAYED_BATCH
        assert _record(config.run_dir)[0] == []


def _record_another_batch(run_dir: Path) -> None:
    """Gives the record of step 1 other samples than those that the trainer has applied."""
    path = batch_path(run_dir, 0)
    samples = pq.read_table(path)
    pq.write_table(samples.take(list(reversed(range(samples.num_rows)))), path)
    with closing(Ledger(run_dir / LEDGER)) as ledger:
        row = ledger.last(Kind.COLLECTED, 0)
        assert row
        row.pop("version")
        ledger.record(Kind.COLLECTED, 0, **{**row, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})


def _record(run_dir: Path) -> tuple[list[int], list[int], list[int]]:
    """Returns the finished steps, the evaluated and the saved versions."""
    with closing(LedgerReader(run_dir)) as ledger:
        rows = ledger.all(Kind.FINISHED), ledger.all(Kind.EVALUATED), ledger.checkpoints(Kind.SAVED)
    finished, evaluated, saved = ([row["version"] for row in kind] for kind in rows)
    return finished, evaluated, saved


def _made(directory: Path, **changes: Any) -> Config:
    directory.mkdir()
    return make_run(directory, NUM_STEPS, **changes)


async def _undisturbed(
    services: Services, directory: Path, deadline: Deadline, **changes: Any
) -> tuple[list[dict[str, float]], list[str]]:
    """Returns the lines of a run that nothing disturbs, and its events."""
    config = _made(directory, **changes)
    deadline.restart()
    await services.run(config)
    return metrics_lines(config.run_dir), deadline.events


async def _run_until_killed(services: Services, config: Config) -> bool:
    """Runs a coordinator; returns whether it was killed before its end."""
    try:
        await services.run(config)
    except BaseException as error:
        if not any(isinstance(one, Killed) for one in killed(error)):
            raise
        return True
    return False
