"""Tests what replay reads from a run's record."""

from contextlib import closing
from pathlib import Path

from services.coordinator.replay.record import Record
from tests.coordinator.runs.killing import make_run, surviving_services


async def test_a_step_has_the_config_of_the_session_that_finished_it(tmp_path: Path) -> None:
    config = make_run(tmp_path, 2)
    async with surviving_services() as services:
        await services.run(config)
        await services.run(config.model_copy(update={"num_steps": 3}))
    with closing(Record(config.run_dir)) as record:
        assert [record.config_of(step).num_steps for step in (1, 2, 3)] == [2, 2, 3]
