"""Traces hold the updates that were asked for, and a snapshot is left when memory runs out."""

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from services.common.config.trainer import ProfilerConfig
from services.trainer.updates.profiler import Profiler

SNAPSHOT = {
    "segments": [
        {
            "address": 4096,
            "total_size": 2097152,
            "allocated_size": 512,
            "active_size": 512,
            "stream": 0,
            "segment_pool_id": (0, 0),
            "blocks": [{"size": 512, "state": "active_allocated", "frames": []}],
        }
    ],
    "device_traces": [
        [
            {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "frames": []},
            {"action": "oom", "device_free": 7, "size": 1 << 40, "stream": 0, "frames": []},
        ]
    ],
}


def config(directory: Path, **settings: Any) -> ProfilerConfig:
    return ProfilerConfig(**{"ranks": (0, 2), "first_step": 1, "num_steps": 2, "directory": str(directory)} | settings)


def multiply() -> None:
    a = torch.ones(3, 5, requires_grad=True)
    (a @ torch.ones(5, 7)).sum().backward()


def run(profiler: Profiler, num_updates: int) -> None:
    for index in range(num_updates):
        with profiler.update(index):
            multiply()
    profiler.close()


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def updates(path: Path) -> list[str]:
    return [event["name"] for event in events(path) if event.get("cat") == "user_annotation"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_nothing_runs() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as fresh:
        multiply()
    # A profiler still running would refuse a second one, or put its updates in.
    assert not torch.autograd._profiler_enabled()
    assert "aten::mm" in {event.key for event in fresh.key_averages()}


def test_trace_has_the_updates_asked_for_and_no_others(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    run(Profiler(config(directory), rank=2), 5)
    assert names(directory) == ["rank-2.steps-1-2.json"]
    trace = events(directory / "rank-2.steps-1-2.json")
    assert updates(directory / "rank-2.steps-1-2.json") == ["update 1", "update 2"]
    products = [event for event in trace if event.get("name") == "aten::mm"]
    # The forward's product and the backward's, in each of two updates; the backward runs on the thread too.
    assert len(products) == 4
    for name in ("update 1", "update 2"):
        (span,) = [event for event in trace if event.get("name") == name]
        of_update = [p for p in products if span["ts"] <= p["ts"] and p["ts"] + p["dur"] <= span["ts"] + span["dur"]]
        assert len(of_update) == 2


def test_trace_of_another_thread_than_the_main_one(tmp_path: Path) -> None:
    # Rank 0 runs its commands so.
    thread = threading.Thread(target=run, args=(Profiler(config(tmp_path), rank=0), 3))
    thread.start()
    thread.join()
    assert updates(tmp_path / "rank-0.steps-1-2.json") == ["update 1", "update 2"]
    assert "aten::mm" in {event.get("name") for event in events(tmp_path / "rank-0.steps-1-2.json")}


def test_trace_has_shapes_memory_and_stacks_when_asked(tmp_path: Path) -> None:
    for name, is_on in (("with", True), ("without", False)):
        settings = {"record_shapes": is_on, "profile_memory": is_on, "with_stack": is_on}
        run(Profiler(config(tmp_path / name, **settings), rank=0), 3)
        trace = events(tmp_path / name / "rank-0.steps-1-2.json")
        shapes = [event["args"].get("Input Dims") for event in trace if event.get("name") == "aten::mm"]
        assert ([[3, 5], [5, 7]] in shapes) is is_on
        assert any(event.get("name") == "[memory]" for event in trace) is is_on
        stacks = [event["name"] for event in trace if event.get("cat") == "python_function"]
        assert any("multiply" in name for name in stacks) is is_on


def test_rank_that_is_not_asked_writes_nothing(tmp_path: Path) -> None:
    run(Profiler(config(tmp_path / "none"), rank=1), 4)
    run(Profiler(config(tmp_path / "none", ranks=()), rank=0), 4)
    assert not (tmp_path / "none").exists()


def test_run_that_ends_before_the_first_profiled_update_writes_nothing(tmp_path: Path) -> None:
    run(Profiler(config(tmp_path), rank=0), 1)
    assert names(tmp_path) == []


def test_close_writes_what_there_is(tmp_path: Path) -> None:
    profiler = Profiler(config(tmp_path, first_step=0, num_steps=100), rank=0)
    run(profiler, 3)
    assert updates(tmp_path / "rank-0.steps-0-2.json") == ["update 0", "update 1", "update 2"]
    assert_nothing_runs()
    (tmp_path / "rank-0.steps-0-2.json").unlink()
    profiler.close()
    assert names(tmp_path) == []


def test_update_that_fails_ends_the_trace(tmp_path: Path) -> None:
    profiler = Profiler(config(tmp_path, num_steps=5), rank=0)
    with profiler.update(1):
        multiply()
    with pytest.raises(ZeroDivisionError), profiler.update(2):
        multiply()
        raise ZeroDivisionError
    assert_nothing_runs()
    assert updates(tmp_path / "rank-0.steps-1-2.json") == ["update 1", "update 2"]
    with profiler.update(3):
        multiply()
    profiler.close()
    assert updates(tmp_path / "rank-0.steps-3-3.json") == ["update 3"]


def test_update_that_fails_while_nothing_is_traced(tmp_path: Path) -> None:
    profiler = Profiler(config(tmp_path), rank=0)
    with pytest.raises(ZeroDivisionError), profiler.update(0):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def out_of_memory(profiler: Profiler, index: int) -> torch.OutOfMemoryError:
    with pytest.raises(torch.OutOfMemoryError) as caught, profiler.update(index):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return caught.value


def test_snapshot_when_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the allocator says is made up, for there is none without a GPU; test_snapshot_on_gpu has a real one.
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    error = out_of_memory(Profiler(config(tmp_path, memory_snapshot=True), rank=1), 0)
    path = tmp_path / "rank-1.oom.json.gz"
    assert error.__notes__ == [f"a snapshot of the GPU memory is in {path}"]
    assert_is_snapshot(path)
    assert "raise OutOfMemoryError # 1.0TiB requested" in _memory_viz.trace(
        json.loads(gzip.decompress(path.read_bytes()))
    )
    assert names(tmp_path) == [path.name]


def assert_is_snapshot(path: Path) -> None:
    snapshot = json.loads(gzip.decompress(path.read_bytes()))
    assert "oom" in {event["action"] for trace in snapshot["device_traces"] for event in trace}
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)  # what the docstring says to look at


def test_trace_is_written_too_when_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    out_of_memory(Profiler(config(tmp_path, memory_snapshot=True), rank=0), 1)
    assert names(tmp_path) == ["rank-0.oom.json.gz", "rank-0.steps-1-1.json"]


def test_no_snapshot_unless_asked(tmp_path: Path) -> None:
    assert not hasattr(out_of_memory(Profiler(config(tmp_path), rank=0), 0), "__notes__")
    assert names(tmp_path) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_snapshot_on_gpu(tmp_path: Path) -> None:
    profiler = Profiler(config(tmp_path, memory_snapshot=True), rank=1)
    with pytest.raises(torch.OutOfMemoryError), profiler.update(0):
        kept = torch.ones(1 << 20, device="cuda")
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    profiler.close()
    assert_is_snapshot(tmp_path / "rank-1.oom.json.gz")
    snapshot = json.loads(gzip.decompress((tmp_path / "rank-1.oom.json.gz").read_bytes()))
    frames = [f for trace in snapshot["device_traces"] for event in trace for f in event.get("frames", [])]
    assert "test_snapshot_on_gpu" in {frame["name"] for frame in frames}
    before = len(torch.cuda.memory._snapshot()["device_traces"][kept.device.index])
    torch.ones(1 << 22, device="cuda")
    assert len(torch.cuda.memory._snapshot()["device_traces"][kept.device.index]) == before  # closed
