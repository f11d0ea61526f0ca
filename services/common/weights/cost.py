"""Measures a member's cost of a publication in addition to moving the bytes: hashing time and memory."""

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch


class Cost:
    """Measures one publication. Create it at the start; call `measured` once the device has finished."""

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self._digest_s = 0.0
        self._kernels: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._held_bytes = torch.cuda.memory_allocated(self._cuda)

    @contextmanager
    def hashing(self) -> Generator[None]:
        """Times the hashing of a bucket on the device that computes it."""
        if self._cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._kernels.append(events)
        else:
            begin = time.perf_counter()
            yield
            self._digest_s += time.perf_counter() - begin

    def measured(self) -> dict[str, float]:
        """Returns the fields of types.v1.PublicationCost."""
        digest_s = self._digest_s + sum(begin.elapsed_time(end) for begin, end in self._kernels) / 1e3
        extra = torch.cuda.max_memory_allocated(self._cuda) - self._held_bytes if self._cuda else 0
        return {"digest_s": digest_s, "extra_bytes": extra}
