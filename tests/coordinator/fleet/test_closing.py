"""Tests that services given by address are told when a run ends, unless it failed."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import InternalError
from services.coordinator.fleet.opening import open_services
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.daemon.harness import MODEL, Fakes, fake_services
from tests.coordinator.fake_services import make_config
from tests.support import raises


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with fake_services() as services:
        yield services


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    config = make_config(name="run", runs_dir=tmp_path, model=str(MODEL))
    with contextlib.closing(Run(config, open_run(config))) as opened:
        yield opened


async def test_a_run_that_is_over_is_closed_where_it_was_opened(fakes: Fakes, run: Run) -> None:
    async with open_services(run, fakes.given):
        assert fakes.trainer.closed == fakes.reward.closed == fakes.replica.closed == []
    assert fakes.trainer.closed == fakes.reward.closed == fakes.replica.closed == [run.run_id]


async def test_a_service_that_ends_with_the_run_is_not_told(fakes: Fakes, run: Run) -> None:
    given = replace(fakes.given, started=frozenset(fakes.given.rollout))
    async with open_services(run, given):
        pass
    assert (fakes.trainer.closed, fakes.replica.closed) == ([run.run_id], [])


async def test_a_run_that_failed_stays_open_to_go_on_with(fakes: Fakes, run: Run) -> None:
    with raises(InternalError):
        async with open_services(run, fakes.given):
            raise InternalError("no memory")
    assert fakes.trainer.closed == fakes.reward.closed == fakes.replica.closed == []


async def test_a_service_that_cannot_close_is_a_warning(
    fakes: Fakes, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    fakes.replica.error["CloseRun"] = InternalError("it hangs")
    async with open_services(run, fakes.given):
        pass
    assert f"run {run.run_id} may still be open at {fakes.replica.address}: it hangs" in caplog.text
    assert fakes.trainer.closed == fakes.reward.closed == [run.run_id]
