"""Runs with a lag, over a real trainer servicer and a rank that only counts: which weights a batch is drawn from."""

import contextlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from services.common.config.run import Config
from services.common.errors import DataLoss
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reader import LedgerReader
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
from tests.trainer.harness_processes import marked

__all__ = ["deadline"]
NUM_STEPS = 4


def made(directory: Path, lag: int, save_freq: int = 1, **changes: Any) -> Config:
    directory.mkdir()
    lagged = {"lag": {"versions": lag}} if lag else {}
    trainer = {"max_tokens_per_microbatch": 16, "loss": {"old_logprobs": "engine"}, **lagged}
    config = make_run(directory, NUM_STEPS, trainer=trainer, **changes)
    return config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"save_freq": save_freq, "max_ckpts_to_keep": 10})}
    )


def drawn(config: Config) -> list[int]:
    """Returns the version that the samples of each batch name, after comparing it with the ledger."""
    files = sorted((config.run_dir / "batches").glob("*.parquet"))
    versions = [{*pq.read_table(file)["policy_version"].to_pylist()} for file in files]
    with contextlib.closing(LedgerReader(config.run_dir)) as ledger:
        recorded = [(ledger.last(Kind.COLLECTED, number) or {})["drawn"] for number in range(len(files))]
    assert versions == [{version} for version in recorded]
    return recorded


@pytest.mark.parametrize("lag", marked([0, 1, 2, 3, 5], long=[0, 2, 3]))
async def test_each_batch_is_drawn_from_exactly_the_version_of_its_lag(tmp_path: Path, lag: int) -> None:
    config = made(tmp_path / "run", lag)
    async with surviving_services() as services:
        assert (await services.run(config)).version == NUM_STEPS
        assert services.rank.trained == [0, 1, 2, 3]
    expected = [max(number - lag, 0) for number in range(NUM_STEPS)]
    assert drawn(config) == expected
    lines = [line for line in metrics_lines(config.run_dir) if "reward/mean" in line]
    if lag:
        assert [line["lag/versions"] for line in lines] == [n - at for n, at in enumerate(expected)]
        assert {line["lag/ess"] for line in lines} == {0.75}
    else:
        assert not any(name.startswith("lag/") for line in lines for name in line)


async def run_until_killed(services: Services, config: Config) -> None:
    try:
        await services.run(config)
    except BaseException as error:
        if not any(isinstance(one, Killed) for one in killed(error)):
            raise


@pytest.mark.parametrize(
    ("lag", "save_freq", "every"),
    [pytest.param(1, 1, 1, marks=pytest.mark.long), pytest.param(2, 2, 1, marks=pytest.mark.long), (2, 2, 15)],
)
async def test_wherever_it_is_killed_a_resumed_run_equals_an_undisturbed_one(
    tmp_path: Path, deadline: Deadline, lag: int, save_freq: int, every: int
) -> None:
    """Kills it at all events of the run, or at every fifteenth."""
    async with surviving_services() as services:
        undisturbed = made(tmp_path / "undisturbed", lag, save_freq)
        deadline.restart()
        await services.run(undisturbed)
        blocks, events = [*services.rank.blocks], [*deadline.events]
        for num_events in range(1, len(events) + 1, every):
            where = f"killed after {num_events} events: {events[:num_events][-3:]}"
            config = made(tmp_path / f"killed-{num_events}", lag, save_freq)
            services.rank.blocks.clear()
            services.rank.trained.clear()
            deadline.restart(num_events)
            await run_until_killed(services, config)
            deadline.restart()
            assert (await services.run(config)).version == NUM_STEPS, where
            # Steps since the checkpoint may have been trained on twice, on the same batches.
            newest = dict(zip(services.rank.trained, services.rank.blocks, strict=True))
            assert [newest[number] for number in sorted(newest)] == blocks, where
            assert metrics_lines(config.run_dir) == metrics_lines(undisturbed.run_dir), where
            assert drawn(config) == drawn(undisturbed), where


async def test_a_batch_of_weights_that_are_gone_is_not_replaced(tmp_path: Path) -> None:
    config = made(tmp_path / "run", 1)
    async with surviving_services() as services:
        await services.run(config.model_copy(update={"num_steps": 3, "checkpoint": config.checkpoint}))
        longer = config
        # At the end of a run nothing is drawn ahead: the longer run begins with a batch of its first weights.
        assert (await services.run(longer)).version == NUM_STEPS
        assert drawn(longer) == [0, 0, 1, 3]
        (config.run_dir / "batches" / "step-000002.parquet").unlink()
        back = longer.model_copy(update={"resume": str(config.run_dir / "checkpoints" / "step-000002")})
        with pytest.raises(DataLoss, match="was sampled from version 1"):
            await services.run(back)
