"""Tests that the files of samples have the answers of their rows, which no service gets."""

from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.coordinator.runs.ledger import Ledger
from services.coordinator.runs.record import Answers, CollectedBatch, RunRecord, batch_path, evaluation_path
from tests.support import make_batch

STAMP = PolicyStamp(version=3, digest="d" * 32)
LONG = "7" * 3_000_000


def answers_in(path: Path) -> list[str | None]:
    return pq.read_table(path)["answer"].to_pylist()


def test_a_batch_is_recorded_with_answers_and_read_without_them(tmp_path: Path) -> None:
    samples, answers = make_batch(3, 2, STAMP), {0: "Rome", 1: None, 2: LONG}
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        record = RunRecord(tmp_path, ledger)
        batch = CollectedBatch(samples, 3, STAMP, {}, {}, "data", 3, None, answers=answers)
        assert record.record_batch(batch).equals(samples)
        again = record.recorded_batch(3, STAMP)
        assert again is not None and again.equals(samples)
    path = batch_path(tmp_path, 3)
    cut = f"{'7' * 2000}\n[… 2,998,000 characters left out …]"
    assert answers_in(path) == ["Rome", "Rome", None, None, cut, cut]
    assert path.stat().st_size < 100_000


def test_an_evaluation_is_recorded_with_answers(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        RunRecord(tmp_path, ledger).keep_evaluation("test", make_batch(2, 1, STAMP), STAMP, {0: "Rome", 1: "Oslo"})
    assert answers_in(evaluation_path(tmp_path, "test-step-000003.parquet")) == ["Rome", "Oslo"]


def test_a_batch_of_rows_without_answers_has_no_such_column(tmp_path: Path) -> None:
    samples, none = make_batch(2, 1, STAMP), list[Answers]([{}, {0: None, 1: None}])
    for version, answers in enumerate(none):
        with closing(Ledger(tmp_path / f"{version}.sqlite")) as ledger:
            batch = CollectedBatch(samples, version, STAMP, {}, {}, "data", 2, None, answers=answers)
            RunRecord(tmp_path, ledger).record_batch(batch)
        assert pq.read_table(batch_path(tmp_path, version)).equals(samples)
