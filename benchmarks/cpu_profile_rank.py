"""Runs the trainer rank that `benchmarks.cpu_profile` profiles."""

import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.profiler import ProfilerActivity, profile

from benchmarks.cpu_profile import REPEATS
from benchmarks.memory_rank import Rank
from services.common.families.architecture import read_architecture
from services.trainer.command import run_ranks

_KEPT = 10  # operators of each phase
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
_PHASES = ("forward", "backward", "optimizer", "publication")


def main() -> None:
    """Runs the case in `argv[1]`, a directory with model/ and case.json; writes profile.json there."""
    directory = Path(sys.argv[1])
    sys.exit(run_ranks(1, functools.partial(_serve, directory)))


def _serve(directory: Path) -> None:
    store, _, _ = next(rendezvous("env://"))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rank = ProfiledRank(directory, json.loads((directory / "case.json").read_text()), store)
    (directory / "profile.json").write_text(json.dumps(rank.measured()))
    os._exit(0)


class ProfiledRank(Rank):
    """Also measures the seconds of each phase and, in the last repeat, those of its operators."""

    def __init__(self, directory: Path, case: dict[str, Any], store: dist.Store):
        super().__init__(directory, case, store, 0, 1)
        self._vocabulary = read_architecture(directory / "model").vocab_size
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._processor: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._operators: dict[str, dict[str, float]] = {}

    def measured(self) -> dict[str, list[float]]:
        """Runs all phases. Returns each quantity's values."""
        peaks = self.run()
        samples = {"memory before the model [MiB]": [peaks["imports"][0] / 2**20]}
        samples["open the model [s]"] = self._seconds["open"]
        for phase in _PHASES:
            samples[f"{phase}, first [s]"] = self._seconds[phase][:1]
            samples[f"{phase} [s]"] = self._seconds[phase][1:]
            samples[f"{phase}, processor time [s]"] = [user + system for user, system in self._processor[phase]]
            samples[f"{phase}, processor time of the kernel [s]"] = [system for _, system in self._processor[phase]]
            # The profiler itself needs memory in the last repeat.
            samples[f"{phase}, peak memory [MiB]"] = [peak / 2**20 for peak in peaks[phase][:-1]]
            for operator, seconds in self._operators[phase].items():
                samples[f"{phase}: {operator} [s]"] = [seconds]
        return samples

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block as a phase."""
        is_profiled = len(self._seconds[name]) == REPEATS - 1
        profiled = profile(activities=[ProfilerActivity.CPU], record_shapes=True) if is_profiled else None
        with super().phase(name):
            if profiled:
                profiled.start()
            begin, before = time.perf_counter(), os.times()
            yield
            self._seconds[name].append(time.perf_counter() - begin)
            after = os.times()
            self._processor[name].append((after.user - before.user, after.system - before.system))
            if profiled:
                profiled.stop()
        if profiled:
            self._operators[name] = self._by_operator(profiled)

    def _by_operator(self, profiled: profile) -> dict[str, float]:
        """Returns the seconds of the operators that take most, and of all others together."""
        totals: dict[str, float] = defaultdict(float)
        for event in profiled.key_averages(group_by_input_shape=True):
            operator = "products of matrices" if event.key in _PRODUCTS else event.key
            if any(self._vocabulary in shape for shape in event.input_shapes if isinstance(shape, list)):
                operator += " with the vocabulary"
            totals[operator] += event.self_cpu_time_total / 1e6
        most = sorted(totals, key=totals.__getitem__, reverse=True)
        kept = {operator: totals.pop(operator) for operator in most[:_KEPT]}
        return kept | {"all other operators": sum(totals.values())}


if __name__ == "__main__":
    main()
