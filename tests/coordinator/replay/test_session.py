"""Tests what `lockstep replay` refuses before it starts a service."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.common.errors import NotFound
from services.coordinator.fleet.launch import Addresses
from services.coordinator.replay import session
from services.coordinator.replay.session import What, replay_session
from services.coordinator.runs.record import batch_path
from tests.coordinator.runs.killing import make_run, surviving_services


class Started(Exception):
    """The services would be started now."""


@pytest.mark.parametrize(
    ("what", "there", "given", "missing"),
    [
        (What.REWARDS, "", Addresses(trainer="127.0.0.1:1"), "model: model"),
        (What.CALLS, "", Addresses(trainer="127.0.0.1:1"), "model: model"),
        (What.TRAIN, "", Addresses(), "model: model"),
        (What.REWARDS, "model", Addresses(), "data.train: rows.parquet"),
        (What.REWARDS, "runs/run/model_card", Addresses(), "data.train: rows.parquet"),
        (What.TRAIN, "", Addresses(trainer="127.0.0.1:1"), ""),
        (What.TRAIN, "model", Addresses(), ""),
        (What.CALLS, "runs/run/model_card", Addresses(), ""),
    ],
)
async def test_a_runs_paths_are_relative_to_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: What, there: str, given: Addresses, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path, 1)
    data = made.data.model_copy(update={"train": (Path("rows.parquet"),)})
    config = made.model_copy(update={"model": "model", "data": data})
    async with surviving_services() as services:
        await services.run(config)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(config.run_dir, elsewhere / "runs" / "run")
    (elsewhere / there).mkdir(exist_ok=True)
    monkeypatch.chdir(elsewhere)

    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(session, "running_services", start)
    if not missing:
        with pytest.raises(Started):
            await replay_session(Path("runs/run"), 1, [what], given, Console())
        return
    with pytest.raises(NotFound) as raised:
        await replay_session(Path("runs/run"), 1, [what], given, Console())
    own = "runs/run/config.json has it relative to the directory in which the run was started; run this command there"
    assert raised.value.message == f"{missing} does not exist here: {own}"
    assert not Path("runs/run/replay").exists()


async def test_a_batch_between_the_checkpoint_and_the_step_that_was_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run(tmp_path, 3)
    config = made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update={"save_freq": 3})})
    async with surviving_services() as services:
        await services.run(config)
    batch_path(config.run_dir, 1).unlink()
    monkeypatch.setattr(session, "running_services", lambda *_, **__: pytest.fail("services are started"))
    with pytest.raises(NotFound, match="the samples of step 2 were not kept"):
        await replay_session(config.run_dir, 3, [What.TRAIN], Addresses(trainer="127.0.0.1:1"), Console())
    assert not (config.run_dir / "replay").exists()
