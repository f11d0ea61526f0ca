"""Where an update's time and memory go: Chrome traces, and what the GPU held when its memory ran out."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from services.common.config.trainer.section import ProfilerConfig
from services.trainer.compat.torch import allocations, record_allocations, stop_recording

_MAX_EVENTS = 100_000  # allocations and frees kept: some updates' worth, and several KB of host memory each


class Profiler:
    """Profiles one rank during one run.

    A trace (chrome://tracing, perfetto) of updates a to b is `rank-{rank}.steps-{a}-{b}.json`; each update in it is an
    annotation `update {index}`. Every rank records its allocations if asked, whichever `ranks` are traced, for any may
    run out of memory: `rank-{rank}.oom.json.gz` is then torch.cuda.memory._snapshot() as JSON. To look at it:

        python -c "import gzip, json; from torch.cuda._memory_viz import trace_plot as plot; \\
            print(plot(json.load(gzip.open('rank-0.oom.json.gz'))))" > oom.html

    All methods belong to one thread: torch traces only the thread that started it, and crashes if another stops it.

    Raises:
        OSError: The directory cannot be made.
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
        """Around the update number `index`, counted from 0 since the run was opened.

        If the update raises, the trace ends and is written; running out of memory gets a note of the snapshot's path.
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
                error.add_note(f"what the memory held is in {self._write_snapshot()}")
            raise
        finally:
            if not goes_on:
                self._stop()

    def close(self) -> None:
        """Writes the trace in progress, if any, and records nothing any more."""
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

    def _write_snapshot(self) -> Path:
        path = (self._directory / f"rank-{self._rank}.oom.json.gz").absolute()
        path.write_bytes(gzip.compress(json.dumps(allocations()).encode(), compresslevel=1))
        return path
