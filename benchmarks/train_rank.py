"""Runs the cases of DIRECTORY/plan.json one after the other, on all ranks.

Run `torchrun -m benchmarks.train_rank DIRECTORY`. Rank 0 appends to DIRECTORY/results.jsonl when a case starts and
after each of its measurements.
"""

import functools
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.rendezvous import rendezvous
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.train_cases import Case, cases, make_samples, sample_lengths
from benchmarks.updating import Part, part_of, update
from services.common import batches
from services.common.families.architecture import read_architecture
from services.trainer.backend import Role
from services.trainer.ranks.calls import Message
from services.trainer.ranks.worker import Worker
from services.trainer.samples import forward_parts

_WARM_UP_SAMPLES = 40  # per data-parallel rank: at least one full micro-batch for each of the two updates

_seconds: defaultdict[str, float] = defaultdict(float)


class Rank:
    """Runs one process: the worker of the trainer service, without the service."""

    def __init__(self, directory: Path):
        store, self.rank, world = next(rendezvous("env://"))
        self._device = torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")
        torch.set_num_threads(1)  # the GPU computes, and several ranks share the CPU
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.worker = Worker(store, self.rank, world, self._device)
        self._directory, self._plan = directory, json.loads((directory / "plan.json").read_text())

    def run(self) -> None:
        """Runs all cases of the plan. An exception ends the process, because other ranks would wait for it."""
        known = dict(cases())
        for name in self._plan["cases"]:
            self._write(name, {})
            self._measure(name, known[name])
        self.worker.close()

    def _measure(self, name: str, case: Case) -> None:
        _prepare(case.strategy)
        self.worker.close()
        left = _gigabytes("memory_allocated")
        begin = time.perf_counter()
        data_rank = self._open(case)
        sizes = {"open [s]": time.perf_counter() - begin, "left by the case before [GB]": left}
        sizes["samples per GPU"] = self._plan["samples_per_gpu"]
        cut = functools.partial(self._parts, case=case, data_rank=data_rank, data_ranks=int(self._max(data_rank)) + 1)
        lengths = sample_lengths(case.model, self._plan["samples_per_gpu"] * case.world, is_tiny=self._plan["tiny"])
        samples = make_samples(lengths, read_architecture(self._directory / case.model).vocab_size)
        warm_up = cut(samples.slice(0, _WARM_UP_SAMPLES * case.world))
        begin = time.perf_counter()
        self._repeat(warm_up, version=0)
        sizes["warm-up [s]"] = time.perf_counter() - begin
        if self._plan["profile"]:
            self._profile(name, warm_up)
        begin = time.perf_counter()
        parts = cut(samples)
        sizes["cutting the batch [s]"] = time.perf_counter() - begin
        self._write(name, sizes | self._balance(parts[1]))
        for index in range(self._plan["repeats"]):
            self._write(name, self._repeat(parts, version=1 + index) | self._memory())

    def _open(self, case: Case) -> int:
        self._has_reference = case.has_reference
        roles = [Role.POLICY, Role.REFERENCE] if case.has_reference else [Role.POLICY]
        answers = [
            self.worker.open(
                role=role,
                config_json=case.config.model_dump_json(),
                model_path=str(self._directory / case.model),
                checkpoint_path="",
                seed=0,
                bucket_bytes=512 << 20,
            )
            for role in roles
        ]
        gc.collect()
        if self._device.type == "cuda":  # rank 0 held the unsharded weights
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return answers[0].body["data_rank"]

    def _parts(self, samples: pa.Table, *, case: Case, data_ranks: int, data_rank: int) -> tuple[Message, Part]:
        """Returns this rank's samples for a forward and for an update."""
        forward, _ = forward_parts(samples, case.config, data_ranks)
        return forward[data_rank], part_of(samples, case.config, data_ranks, data_rank)

    def _repeat(self, parts: tuple[Message, Part], *, version: int) -> dict[str, float]:
        """Returns the seconds of a reference's forward, of an update, and of the parts of that update."""
        forward, train = parts
        measured: dict[str, float] = {}
        begin = self._together()
        role = Role.REFERENCE if self._has_reference else Role.POLICY
        self.worker.forward(role=role, **forward.body, frames=forward.frames, temperature=1.0)
        measured["reference forward [s]"] = self._together() - begin
        _seconds.clear()
        begin = self._together()
        update(self.worker, train, version=version)
        measured["train [s]"] = self._together() - begin
        return measured | {
            "train: policy forward [s]": _seconds["forward"],
            "train: forward and backward [s]": _seconds["accumulate"],
            "train: optimizer [s]": _seconds["step"],
        }

    def _balance(self, part: Part) -> dict[str, float]:
        """Returns how well this workload fills its micro-batches, and how balanced the ranks are."""
        train, _ = part
        table = batches.decode(train.frames)
        num_tokens = sum(pc.sum(pc.list_value_length(table[name])).as_py() for name in ("prompt_tokens", "tokens"))
        num_microbatches = sum(len(sizes) for _, sizes in train.body["minibatches"])
        total = torch.tensor([float(num_tokens)], device=self._device)
        dist.all_reduce(total)
        return {
            "micro-batches per GPU": num_microbatches,
            "tokens of a micro-batch": num_tokens / num_microbatches,
            "fullest GPU's tokens over the mean": self._max(num_tokens) * dist.get_world_size() / float(total),
        }

    def _memory(self) -> dict[str, float]:
        """Returns the peak memory since the last call, of the GPU that needs most."""
        if self._device.type != "cuda":
            return {}
        names = {"peak allocated [GB]": "max_memory_allocated", "peak reserved [GB]": "max_memory_reserved"}
        measured = {quantity: self._max(_gigabytes(name)) for quantity, name in names.items()}
        measured["idle [GB]"] = self._max(_gigabytes("memory_allocated"))
        # Each retry freed the whole cache and waited for the GPU.
        measured["allocation retries"] = self._max(torch.cuda.memory_stats()["num_alloc_retries"])
        torch.cuda.reset_peak_memory_stats()
        return measured

    def _profile(self, name: str, parts: tuple[Message, Part]) -> None:
        """Writes the kernels on which a short batch spends most time to DIRECTORY/<name>.txt."""
        if self.rank:
            self._repeat(parts, version=0)
            return
        with profile() as profiled:
            self._repeat(parts, version=0)
        averages = profiled.key_averages()
        text = averages.table(sort_by=f"self_{self._device.type}_time_total", row_limit=40, max_name_column_width=90)
        (self._directory / f"{name.replace(' ', '_')}.txt").write_text(text)

    def _together(self) -> float:
        """Returns the time after all ranks have arrived and the GPU has finished."""
        _synchronize()
        dist.barrier()
        return time.perf_counter()

    def _max(self, value: float) -> float:
        largest = torch.tensor([float(value)], device=self._device, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def _write(self, name: str, measured: dict[str, float]) -> None:
        if self.rank == 0:
            with (self._directory / "results.jsonl").open("a") as file:
                file.write(json.dumps({"case": name, "measured": measured}) + "\n")
            Console(stderr=True, width=200).print(name, measured, highlight=False)


@functools.cache
def _prepare(strategy: str) -> None:
    """Makes backends create random weights on the GPU instead of loading files, and report where their time goes."""
    if strategy == "fsdp":
        patch.object(AutoModelForCausalLM, "from_pretrained", _random_model).start()
        module = import_module("services.trainer.fsdp.loading")
        kind = import_module("services.trainer.fsdp.backend").FsdpBackend
    else:
        module = import_module("services.trainer.megatron.backend")
        patch.object(module, "load_checkpoint_weights", lambda *args: None).start()
        kind = module.MegatronBackend
    patch.object(module, "require_loadable", lambda *args, **kwargs: None).start()
    for name in ("forward", "accumulate", "step"):
        setattr(kind, name, _timed(getattr(kind, name), name))


def _random_model(path: str, *, dtype: torch.dtype, **of_files: object) -> tuple[torch.nn.Module, dict[str, list[str]]]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    return model, {"missing_keys": [], "mismatched_keys": []}


def _timed(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        _synchronize()
        begin = time.perf_counter()
        result = method(*args, **kwargs)
        _synchronize()
        _seconds[name] += time.perf_counter() - begin
        return result

    return timed


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _gigabytes(name: str) -> float:
    return getattr(torch.cuda, name)() / 1e9 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    Rank(Path(sys.argv[1])).run()
