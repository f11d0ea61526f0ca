"""Tests what replay reads from a run's record."""

from contextlib import closing
from pathlib import Path

import pytest

from services.coordinator.replay.record import Record
from services.coordinator.runs.resume import open_run
from tests.coordinator.runs.killing import make_run, surviving_services


async def test_a_step_has_the_config_of_the_session_that_finished_it(tmp_path: Path) -> None:
    config = make_run(tmp_path, 2)
    async with surviving_services() as services:
        await services.run(config)
        await services.run(config.model_copy(update={"num_steps": 3}))
    with closing(Record(config.run_dir)) as record:
        assert [record.config_of(step).num_steps for step in (1, 2, 3)] == [2, 2, 3]


@pytest.mark.parametrize("is_first_elsewhere", [True, False])
async def test_a_run_starts_where_it_was_opened_when_its_services_were(
    tmp_path: Path, is_first_elsewhere: bool
) -> None:
    """The first command ends before it has opened the services. The second starts elsewhere."""
    other = make_run(tmp_path, 1, advantage={"kind": "gae"}, critic={})
    own = other.model_copy(update={"name": "own", "num_steps": 2})
    checkpoint = other.run_dir / "checkpoints" / "step-000001"
    from_other = own.model_copy(update={"resume": str(checkpoint)})
    first, second = (from_other, own) if is_first_elsewhere else (own, from_other)
    async with surviving_services() as services:
        await services.run(other)
        open_run(first).ledger.close()
        await services.run(second)
    with closing(Record(own.run_dir)) as record:
        assert record.start(2) == (2, str(own.run_dir / "checkpoints" / "step-000002"))
        if is_first_elsewhere:
            assert (record.start(0), record.critic_start(0)) == ((0, ""), (0, ""))
        else:
            assert (record.start(1), record.critic_start(1)) == ((1, str(checkpoint)), None)
