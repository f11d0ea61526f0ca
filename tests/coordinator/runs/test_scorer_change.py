"""Tests that a run that resumes with an edited reward or environment says so."""

from pathlib import Path

import pytest

from services.coordinator.runs.record import batch_path
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from services.coordinator.runs.scorer_change import warn_of_other_versions
from tests.coordinator.fake_services import make_config
from tests.coordinator.fake_steps import steps


@pytest.fixture
async def newest(tmp_path: Path) -> Path:
    """Returns the newest batch of a run of two steps."""
    data = {"train": "x.parquet", "prompts_per_step": 2}
    config = make_config(runs_dir=tmp_path, data=data, rollout={"completions_per_prompt": 2})
    async with steps(config, 4, lambda prompt_id, token: float(token % 2)) as given:
        await given.live(0, 2)
    run = Run(config, open_run(config))
    newest = run.record.newest_batch()
    run.close()
    assert newest == batch_path(config.run_dir, 1)
    return newest


def test_only_what_changed_is_named_with_both_versions(newest: Path, caplog: pytest.LogCaptureFixture):
    warn_of_other_versions(newest, "fake 1", "")
    assert caplog.messages == []
    warn_of_other_versions(newest, "fake 2", "python 1/b")
    scorer, environment = caplog.messages
    assert scorer == "scorer fake 2 was fake 1 in the newest batch of this run: rewards may differ"
    assert environment.startswith("environment python 1/b was ")


def test_a_run_without_batches_or_with_a_damaged_one_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    for batch in (None, tmp_path / "none.parquet", tmp_path / "damaged.parquet"):
        warn_of_other_versions(batch, "fake 1", "")
    assert caplog.messages == []
