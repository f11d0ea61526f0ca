"""Tests that the report of a run that went back to a checkpoint leaves out the steps after it."""

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.coordinator.daemon.history import read_run
from services.coordinator.observe.report import samples, summary
from services.coordinator.observe.report.page import gather
from services.coordinator.runs import ledger as of_ledger
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from services.coordinator.runs.reader import LedgerReader
from tests.coordinator.fake_services import make_config
from tests.coordinator.runs.killing import make_run, surviving_services


async def test_samples_and_time_are_of_what_the_run_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1_000.0]
    monkeypatch.setattr(of_ledger, "time", SimpleNamespace(time=lambda: now_s[0]))
    config = make_run(tmp_path, 2)
    async with surviving_services() as services:
        await services.run(config)
        before = gather(config.run_dir)
        back = {"num_steps": 1, "resume": str(config.run_dir / "checkpoints" / "step-000001")}
        now_s[0] += 3_600.0
        await services.run(config.model_copy(update=back))
    data = gather(config.run_dir)
    held_out = [f"held-out test after step {step}" for step in range(3)]
    labels = [held_out[0], "step 1", held_out[1], "step 2", held_out[2]]
    assert [source["label"] for source in before["samples"]] == labels
    assert [source["label"] for source in data["samples"]] == labels[:3]
    assert list(data["histogram"]["counts"]) == [1]
    assert dict(data["facts"])["duration"] == "0 min 00 s in 2 sessions"
    assert before["notes"] == []
    assert data["notes"] == ["Not shown: 2 files of samples of later steps, which the run has left by going back."]


_Row = tuple[Kind, int, Mapping[str, Any]]


def publish(version: int, digest: str) -> _Row:
    return Kind.PUBLISHED, version, {"digest": digest}


def collect(version: int, digest: str, drawn: int) -> _Row:
    return Kind.COLLECTED, version, {"digest": digest, "drawn": drawn, "sha256": "s", "dataset": "d"}


def finish(version: int) -> _Row:
    return Kind.FINISHED, version, {}


def evaluate(version: int) -> _Row:
    return Kind.EVALUATED, version, {}


BACK = (Kind.BEGUN, 2, {})
AGAIN = [BACK, publish(2, "a2"), finish(3), publish(3, "b3")]


@pytest.mark.parametrize(
    ("rows", "changes", "steps", "evaluated"),
    [
        ([], {}, [1, 2, 3, 4], [0, 2, 4]),
        ([BACK], {}, [1, 2, 3], [0, 2]),  # step 3 trains on the same batch again
        ([BACK], {"num_steps": 2}, [1, 2], [0, 2]),
        ([BACK, publish(2, "b2")], {}, [1, 2], [0, 2]),
        (AGAIN, {}, [1, 2, 3], [0, 2]),
        ([*AGAIN, collect(3, "b3", 3)], {}, [1, 2, 3, 4], [0, 2]),
        ([*AGAIN, collect(3, "b3", 3), finish(4)], {}, [1, 2, 3, 4], [0, 2]),
        ([*AGAIN, finish(4), (Kind.EVAL_SAMPLES, 4, {"file": "f", "sha256": "s"})], {}, [1, 2, 3, 4], [0, 2, 4]),
        ([collect(3, "a2", 2), BACK], {}, [1, 2, 3, 4], [0, 2]),  # with a lag, two batches are of the same weights
    ],
)
def test_which_files_are_of_the_run(
    tmp_path: Path, rows: Sequence[_Row], changes: Mapping[str, int], steps: list[int], evaluated: list[int]
) -> None:
    for name in ("batches/step-{:06d}", "evaluations/test-step-{:06d}"):
        for version in range(4) if name.startswith("batches") else (0, 2, 4):
            path = tmp_path / f"{name.format(version)}.parquet"
            path.parent.mkdir(exist_ok=True)
            path.touch()
    step = [(publish(n, f"a{n}"), collect(n, f"a{n}", n), finish(n + 1)) for n in range(4)]
    before = [(Kind.BEGUN, 0, {}), *itertools.chain(*step[:2], [evaluate(2)], *step[2:], [evaluate(4)])]
    with closing(Ledger(tmp_path / LEDGER)) as ledger:
        config = make_config(**{"num_steps": 4, **changes}).model_dump_json()
        ledger.record(Kind.OPENED, run_id="r", config=config, checkpoint="")
        for kind, version, body in (evaluate(0), *before, *rows):
            ledger.record(kind, version, **body)
    with closing(LedgerReader(tmp_path)) as ledger:
        found = samples.of_run(samples.sources(tmp_path), ledger)
    assert [source.step for source in found if not source.held_out] == steps
    assert [source.step for source in found if source.held_out] == evaluated


def test_a_session_that_did_not_begin_changes_no_config(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / LEDGER)) as ledger:
        for num_steps in (4, 8):
            config = make_config(num_steps=num_steps).model_dump_json()
            ledger.record(Kind.OPENED, run_id="r", config=config, checkpoint="")
            if num_steps == 4:
                ledger.record(Kind.BEGUN, 0)
    with closing(LedgerReader(tmp_path)) as ledger:
        shown = summary.head(tmp_path, ledger, [{"step": 4}])
    assert (dict(shown["facts"])["steps"], json.loads(shown["config"])["num_steps"]) == ("4 of 4", 4)
    run = read_run(tmp_path)
    assert run and run.num_steps == 4


def test_a_clock_that_was_set_back_gives_no_negative_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter((10_000.0, 10_060.0, 9_000.0, 2_000.0, 2_030.0))
    monkeypatch.setattr(of_ledger, "time", SimpleNamespace(time=lambda: next(times_s)))
    opened = {"run_id": "r", "config": make_config(num_steps=4).model_dump_json(), "checkpoint": ""}
    with closing(Ledger(tmp_path / LEDGER)) as ledger:
        for kind in (Kind.OPENED, Kind.BEGUN, Kind.EPOCH, Kind.OPENED, Kind.BEGUN):
            ledger.record(kind, 0, **(opened if kind is Kind.OPENED else {}))
    with closing(LedgerReader(tmp_path)) as ledger:
        assert dict(summary.head(tmp_path, ledger, [])["facts"])["duration"] == "0 min 30 s in 2 sessions"
