"""Tests that a run whose disk is full, read-only or gone says so in one line, and loses nothing that it had."""

import json
import logging
import math
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lockstep.types.v1.types_pb2 import PolicyStamp
from tensorboardX.proto.event_pb2 import Event, SessionLog

from services.common.errors import DataLoss, PreconditionFailed, Reason
from services.coordinator.observe.frontend import RunLog
from services.coordinator.observe.reporters import JsonLines, TensorBoard
from services.coordinator.runs import database
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.record import CollectedBatch, RunRecord
from services.coordinator.runs.reporter import Reporters
from services.coordinator.runs.resume import open_run
from tests.coordinator.fake_services import make_config
from tests.small_disk import NUM_BYTES, SmallDisk, small_disk

STEP = {"time/step_s": 1.0, "reward/mean": 0.5}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


def batch_of(num_bytes: int, version: int = 0) -> CollectedBatch:
    noise = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    samples, stamp = pa.table({"noise": noise}), PolicyStamp(version=version, digest="d")
    return CollectedBatch(samples, version, stamp, decision={}, outcomes={}, dataset="data", num_prompts=1, kl=None)


def refused(action: Callable[[], object], path: Path, fix: str) -> None:
    with pytest.raises(PreconditionFailed) as caught:
        action()
    error = caught.value
    assert error.reason is Reason.STORAGE_FAILED
    assert str(path) in error.message and fix in error.message and "\n" not in error.message


@pytest.mark.long
def test_a_batch_has_a_column_of_more_bytes_than_a_page_can_have(tmp_path: Path) -> None:
    """Rows of a teacher's tokens, or of routed experts, of 2 MiB each: 1,024 of them are 2 GiB."""
    row = np.random.default_rng(0).integers(0, 256, (2 << 20) + 1000, dtype=np.uint8).tobytes()
    samples, stamp = pa.table({"bytes": pa.array([row] * 1100, pa.large_binary())}), PolicyStamp(digest="d")
    record = RunRecord(tmp_path, Ledger(tmp_path / "ledger.sqlite"))
    record.record_batch(
        CollectedBatch(samples, 0, stamp, decision={}, outcomes={}, dataset="data", num_prompts=1, kl=None)
    )
    recorded = record.recorded_batch(0, stamp)
    assert recorded is not None and recorded.num_rows == 1100
    assert {len(one) for one in recorded["bytes"].to_pylist()} == {len(row)}


def test_a_full_disk_ends_a_batch_with_a_word_and_the_run_goes_on_when_there_is_space(disk: SmallDisk):
    directory = disk.path / "run"
    directory.mkdir()
    ledger = Ledger(directory / "ledger.sqlite")
    record = RunRecord(directory, ledger)
    record.record_batch(batch_of(1000))
    refused(lambda: record.record_batch(batch_of(2 * NUM_BYTES, 1)), directory / "batches", "free space")
    assert not list((directory / "batches").glob("*.partial"))
    disk.fill()

    def decide() -> None:
        for _ in range(100):  # the file has room for some
            ledger.record(Kind.EPOCH, text="x" * 4096)

    refused(decide, directory / "ledger.sqlite", "free space")
    disk.free()
    record.record_batch(batch_of(1000, 1))
    ledger.close()
    ledger = Ledger(directory / "ledger.sqlite")
    assert [row["version"] for row in ledger.all(Kind.COLLECTED)] == [0, 1]
    assert RunRecord(directory, ledger).recorded_batch(1, PolicyStamp(version=1, digest="d")) is not None
    ledger.close()


def test_what_a_killed_coordinator_was_writing_is_removed(tmp_path: Path):
    left = [tmp_path / folder / ".step-000001.parquet.9.partial" for folder in ("batches", "evaluations")]
    for path in left:
        path.parent.mkdir()
        path.touch()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    RunRecord(tmp_path, ledger)
    ledger.close()
    assert not any(path.exists() for path in left)


def test_a_transaction_that_fills_the_disk_keeps_nothing_and_says_why(disk: SmallDisk):
    ledger = Ledger(disk.path / "ledger.sqlite")

    def decide() -> None:
        with ledger.transaction():
            ledger.record(Kind.SELECTED, 0)
            ledger.record(Kind.COLLECTED, 0, text="x" * 2 * NUM_BYTES)

    refused(decide, disk.path / "ledger.sqlite", "free space")
    assert ledger.last(Kind.SELECTED) is None
    assert ledger.record(Kind.EPOCH)
    ledger.close()


def test_a_read_only_disk_is_named_at_the_start_and_later(disk: SmallDisk):
    directory = disk.path / "run"
    directory.mkdir()
    disk.make_read_only()
    for where in (disk.path / "other", disk.path):
        refused(lambda where=where: open_run(make_config(runs_dir=where)), where, "make it writable")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_is_gone_ends_the_run_before_a_decision_is_lost(tmp_path: Path, replaced: bool):
    directory = tmp_path / "run"
    directory.mkdir()
    ledger = Ledger(directory / "ledger.sqlite")
    record = RunRecord(directory, ledger)
    shutil.rmtree(directory)
    refused(lambda: record.record_batch(batch_of(10)), directory, "bring the directory back")
    if replaced:
        directory.mkdir()
        Ledger(directory / "ledger.sqlite").close()
    refused(lambda: ledger.record(Kind.EPOCH), directory / "ledger.sqlite", "bring the directory back")
    ledger.close()


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path):
    (tmp_path / "ledger.sqlite").write_bytes(b"no database, but long enough to have a header of one" * 100)
    for _ in range(2):  # the lock is released
        with pytest.raises(DataLoss, match=r"ledger\.sqlite is damaged"):
            Ledger(tmp_path / "ledger.sqlite")


def test_reporters_of_a_full_disk_do_not_end_the_run(disk: SmallDisk, caplog: pytest.LogCaptureFixture):
    ledger = Ledger(disk.path / "ledger.sqlite")
    files = [JsonLines(disk.path / "metrics.jsonl", 0, ledger), TensorBoard(disk.path / "tensorboard", 0)]
    reporters = Reporters(files)
    disk.fill()
    for version in range(1, 200):
        reporters.tell(lambda reporter, step=version: reporter.step(step, STEP))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert all("No space left" in record.message for record in caplog.records)
    disk.free()
    for version in range(1, 201):
        ledger.record(Kind.FINISHED, version, **STEP)
    reporters.tell(lambda reporter: reporter.step(200, STEP))
    reporters.tell(lambda reporter: reporter.close())
    JsonLines(disk.path / "metrics.jsonl", 200, ledger).close()
    lines = [json.loads(line) for line in (disk.path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": version, **STEP} for version in range(1, 201)]
    ledger.close()


def test_lines_that_a_full_disk_refused_are_written_when_there_is_space(disk: SmallDisk):
    ledger, path = Ledger(disk.path / "ledger.sqlite"), disk.path / "metrics.jsonl"
    lines = Reporters([JsonLines(path, 0, ledger)])
    disk.fill()
    for version in range(1, 200):
        lines.tell(lambda reporter, step=version: reporter.step(step, STEP))
    assert path.read_bytes().endswith(b"\n") or not path.read_bytes()
    disk.free()
    lines.tell(lambda reporter: reporter.evaluation(199, {"eval/test/reward": 0.5}))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in found] == [*range(1, 200), 199]
    disk.fill()
    for version in range(200, 400):
        lines.tell(lambda reporter, step=version: reporter.step(step, STEP))
    disk.free()
    lines.tell(lambda reporter: reporter.close())
    assert len(path.read_text().splitlines()) == 400
    ledger.close()


def test_the_log_of_a_full_disk_says_so_once(disk: SmallDisk, capsys: pytest.CaptureFixture[str]):
    handler = RunLog(disk.path / "coordinator.log")
    disk.fill()
    for _ in range(100):
        handler.handle(logging.makeLogRecord({"msg": "x" * 1000}))
    handler.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("coordinator.log misses lines: No space left on device")


def test_a_later_session_hides_later_steps_in_tensorboard(tmp_path: Path):
    writer = TensorBoard(tmp_path, 3)
    writer.step(4, {"a/b": 1.5})
    writer.close()
    (path,) = tmp_path.iterdir()
    content, events = path.read_bytes(), []
    while content:  # records: length, its checksum, the event, its checksum
        (size,) = struct.unpack("<Q", content[:8])
        events.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    assert [event.step for event in events] == [0, 4, 4]
    assert events[0].file_version == "brain.Event:2"
    assert events[1].session_log.status == SessionLog.START
    (value,) = events[2].summary.value
    assert (value.tag, value.simple_value) == ("a/b", 1.5)


DAMAGED = b'{"step": 2, "reward/mean": \xff}'


def test_damaged_lines_are_taken_from_the_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, ledger = tmp_path / "metrics.jsonl", Ledger(tmp_path / "ledger.sqlite")
    held_out = {"eval/test/reward": 0.25}
    ledger.record(Kind.EVALUATED, 0, **held_out)
    for version in (1, 2, 3, 4):
        ledger.record(Kind.FINISHED, version, **STEP)
        ledger.record(Kind.EVALUATED, version, **held_out)
    changed = json.dumps({"step": 1, **STEP, "time/step_s": 7.0}).encode()
    evaluated = json.dumps({"step": 1, **held_out, "time/evaluating_s": 3.0}).encode()
    path.write_bytes(b"\n".join([changed, evaluated, DAMAGED, b"not JSON", b'{"step": 3, "time/st']))
    before = path.read_bytes()
    JsonLines(path, 3, ledger).close()
    ledger.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 0, **held_out},
        {"step": 1, **STEP},
        {"step": 1, **held_out, "time/evaluating_s": 3.0},
        *({"step": version, **values} for version in (2, 3) for values in (STEP, held_out)),
    ]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == before
    (record,) = caplog.records
    assert "line 3, 4 was damaged" in record.message


def test_a_line_with_nan_is_that_of_its_row(tmp_path: Path):
    path, ledger = tmp_path / "metrics.jsonl", Ledger(tmp_path / "ledger.sqlite")
    ledger.record(Kind.EVALUATED, 1, **{"eval/test/reward": math.nan})
    line = json.dumps({"step": 1, "eval/test/reward": math.nan, "time/evaluating_s": 3.0})  # the last only here
    path.write_text(f"{line}\n")
    JsonLines(path, 1, ledger).close()
    ledger.close()
    assert path.read_text() == f"{line}\n"


def test_an_error_of_the_disk_on_a_full_one_says_so(disk: SmallDisk):
    """So SQLite says that it has no room for the index of a log that a killed run has left."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    assert "check the disk" in database._failure(disk.path / "ledger.sqlite", error).message
    disk.fill()
    assert "free space" in database._failure(disk.path / "ledger.sqlite", error).message
