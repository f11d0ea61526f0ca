"""Spans in the Trace Event Format."""

import json
import tracemalloc
from pathlib import Path

import pytest

from services.common.telemetry import Trace, join


def test_spans_of_two_processes_in_one_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    with Trace(first, "trainer").span("Train", version=3), Trace(second, "reward").span("Score"):
        pass
    again = Trace(first, "trainer, started again")
    with again.span("Train"), pytest.raises(ValueError), again.span("fails"):
        raise ValueError
    with first.open("a") as file:
        file.write('{"ph": "b", "na')  # killed while it wrote
    join([first, second], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["trainer", "trainer, started again", "reward"]
    for name, count in (("Train", 2), ("Score", 1), ("fails", 1)):
        begins = [e for e in events if e["ph"] == "b" and e["name"] == name]
        ends = [e for e in events if e["ph"] == "e" and e["name"] == name]
        assert len(begins) == len(ends) == count
        assert all(b["id2"] == e["id2"] and b["ts"] <= e["ts"] for b, e in zip(begins, ends, strict=True))
    assert next(e for e in events if e["name"] == "Train")["args"] == {"version": 3}


def test_a_line_that_a_full_disk_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for name in ("lost", "kept"):
        trace = Trace(path, "a")
        with trace.span(name, sizes={"x": 1}):
            pass
        trace.close()
        if name == "lost":
            path.write_bytes(path.read_bytes()[:-20])
    join([path], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events if event["ph"] != "M"] == ["lost", "kept", "kept"]  # each begins and ends


def test_a_long_trace_is_joined_without_being_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[\n" + '{"ph": "b", "name": "x"},\n' * 50_000)
    tracemalloc.start()
    join([path, path], tmp_path / "trace.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 < path.stat().st_size
    assert len(json.loads((tmp_path / "trace.json").read_text())) == 100_000


def test_a_closed_trace_keeps_no_file_open_and_writes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.json"
    trace = Trace(path, "coordinator")
    with trace.span("step"):
        pass
    assert path in open_files()
    trace.close()
    assert path not in open_files()
    written = path.read_text()
    with trace.span("step"):
        pass
    assert path.read_text() == written


def open_files() -> set[Path]:
    return {link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


def test_no_path_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Trace("", "").span("x"):
        assert not list(tmp_path.iterdir())
