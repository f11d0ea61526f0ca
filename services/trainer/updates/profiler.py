"""Records where an update spends time and memory: Chrome traces, and a snapshot when the GPU runs out of memory."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from services.common.config.trainer import ProfilerConfig
from services.trainer.compat.torch import allocations, record_allocations, stop_recording

_MAX_EVENTS = 100_000  # the newest allocations and frees: a few updates, at several KB of host memory per event


class Profiler:
    """Profiles one rank during one run.

    The trace of updates a to b is written to `rank-{rank}.steps-{a}-{b}.json` (open it in chrome://tracing or
    Perfetto). It marks each update with an annotation `update {index}`.

    With `memory_snapshot`, every rank records its allocations, whether or not `ranks` names it, because any rank may
    run out of memory. A rank that does writes torch.cuda.memory._snapshot() as JSON to `rank-{rank}.oom.json.gz`. To
    view it:

        python -c "import gzip, json; from torch.cuda._memory_viz import trace_plot as plot; \\
            print(plot(json.load(gzip.open('rank-0.oom.json.gz'))))" > oom.html

    Call all methods from one thread: torch traces only the thread that started a trace, and crashes if another thread
    stops it.

    Raises:
        OSError: The directory cannot be created.
    """

    def __init__(self, config: ProfilerConfig, rank: int):
        self._config, self._rank, self._directory = config, rank, Path(config.directory)
        num_steps = config.num_steps if rank in config.ranks else 0
        self._steps = range(config.first_step, config.first_step + num_steps)
        self._trace: torch.profiler.profile | None = None
        self._traced: list[int] = []
        self._records_memory = config.memory_snapshot and torch.cuda.is_available()
        if self._steps or config.memory_snapshot:
            self._directory.mkdir(parents=True, exist_ok=True)
        if self._records_memory:
            record_allocations(_MAX_EVENTS)

    @contextmanager
    def update(self, index: int) -> Iterator[None]:
        """Profiles the block, which runs update number `index`, counted from 0 since the run was opened.

        If the update raises, the trace ends and is written. An out-of-memory error gets a note with the snapshot's
        path.
        """
        goes_on = False
        try:
            if index in self._steps:
                self._start(index)
            with record_function(f"update {index}"):
                yield
            goes_on = index + 1 in self._steps
        except torch.OutOfMemoryError as error:
            if self._config.memory_snapshot:
                path = (self._directory / f"rank-{self._rank}.oom.json.gz").absolute()
                path.write_bytes(gzip.compress(json.dumps(allocations()).encode(), compresslevel=1))
                error.add_note(f"a snapshot of the GPU memory is in {path}")
            raise
        finally:
            if not goes_on:
                self._stop()

    def close(self) -> None:
        self._stop()
        if self._records_memory:
            self._records_memory = False
            stop_recording()

    def _start(self, index: int) -> None:
        self._traced.append(index)
        if self._trace is not None:
            return
        config, activities = self._config, [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(
            activities=activities,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
        )
        self._trace.start()

    def _stop(self) -> None:
        trace, self._trace = self._trace, None
        steps, self._traced = self._traced, []
        if trace is not None:
            trace.stop()
            path = self._directory / f"rank-{self._rank}.steps-{steps[0]}-{steps[-1]}.json"
            trace.export_chrome_trace(str(path))
