"""The part `training` of `benchmarks.fp8`: updates of a few layers of a model on one GPU, in bfloat16 and in float8.

Each case runs in a process of its own. Weights and tokens are random, and all updates are of the same batch, which the
model learns by heart with the loss of kind sft: the curves of the loss lie beside each other. MFU is
benchmarks.train_cases.forward_operations times three, divided by seconds and by 989 TFLOP/s, the dense bfloat16 rate of
an H100 or H200, also for float8, whose own rate is twice that.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig

from benchmarks.megatron_layouts import MODELS, TINY
from benchmarks.report import keep
from benchmarks.train_cases import forward_operations, make_samples
from services.common.config.trainer import TrainerConfig
from services.common.families.architecture import read_architecture
from services.common.weights.buckets import WeightDigest
from services.trainer.backend import Role
from services.trainer.ranks.worker import Worker

_SHAPE, _NUM_LAYERS = "qwen3-8b", 8  # as many as fit a GPU with 80 GB
_KINDS = ("none", "tensorwise", "blockwise")
_NAMES = {"none": "bf16"}
_NUM_SAMPLES, _PROMPT_TOKENS, _COMPLETION_TOKENS = 32, 128, 896
_WARM_UP = 3  # updates whose seconds do not count
_LAST = 5  # updates at the end whose losses are compared


@dataclass(frozen=True)
class Case:
    """The precision of the model's products, and its size."""

    fp8: str
    is_tiny: bool

    @property
    def name(self) -> str:
        return f"{_NUM_LAYERS} layers of {_SHAPE}, {_NAMES.get(self.fp8, f'fp8 {self.fp8}')}"

    @property
    def trainer(self) -> TrainerConfig:
        """Returns the settings of the update."""
        return TrainerConfig.model_validate(
            {
                "strategy": "megatron",
                "compute_dtype": "bfloat16",
                "max_tokens_per_microbatch": 8192,
                "loss": {"kind": "sft"},
                "optim": {"lr": 1e-4},
                "megatron": {"fp8": self.fp8},
            }
        )

    def write_config(self, path: Path) -> None:
        """Writes config.json, without weights."""
        kind, shape = MODELS[_SHAPE]
        sizes = shape | {"num_hidden_layers": _NUM_LAYERS} | (TINY if self.is_tiny else {})
        AutoConfig.for_model(kind, **sizes).save_pretrained(path)


def measure(case: Case, out: Path, num_updates: int) -> None:
    """Updates the policy, and writes what it has found to `out` after each update. A process of its own."""
    from benchmarks.train_rank import _prepare
    from benchmarks.updating import part_of, update

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = out.with_suffix("")
    case.write_config(model)
    _prepare("megatron")
    worker = Worker(dist.HashStore(), 0, 1, device)
    worker.open(
        role=Role.POLICY,
        config_json=case.trainer.model_dump_json(),
        model_path=str(model),
        checkpoint_path="",
        seed=0,
        bucket_bytes=512 << 20,
    )
    architecture = read_architecture(model)
    sizes = (_PROMPT_TOKENS, _COMPLETION_TOKENS) if not case.is_tiny else (8, 24)
    lengths = np.tile(np.array(sizes), (_NUM_SAMPLES, 1))
    part = part_of(make_samples(lengths, architecture.vocab_size), case.trainer, 1, 0)
    operations = 3 * forward_operations(architecture, lengths.sum(1))
    found: dict[str, Any] = {"digest": _digest(worker, device), "operations": operations, "seconds": [], "loss": []}
    found["tokens"] = int(lengths.sum())
    for version in range(num_updates):
        _synchronize()
        begin = time.perf_counter()
        metrics = update(worker, part, version=version)
        _synchronize()
        found["seconds"].append(time.perf_counter() - begin)
        found["loss"].append(metrics["loss"])
        found["peak_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        out.write_text(json.dumps(found))
    worker.close()


def _digest(worker: Worker, device: torch.device) -> str:
    """Returns the hash of the weights that the worker would publish."""
    digest, start = WeightDigest("", device), 0
    for _, tensor in worker._backends[Role.POLICY].weights():
        if type(tensor.data) is not torch.Tensor or tensor.dtype is not torch.bfloat16:
            raise TypeError(f"published weights must be plain bfloat16, not {type(tensor.data)} of {tensor.dtype}")
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 16))
        digest.update(flat, start=start)
        start += flat.numel()
    return digest.hexdigest()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(options: argparse.Namespace) -> None:
    """Measures all cases, and saves the result after each."""
    from benchmarks.train import PEAK_FLOPS

    kinds = _KINDS if torch.cuda.is_available() else _KINDS[:1]
    cases = [Case(fp8, options.tiny) for fp8 in kinds]
    found: dict[Case, dict[str, Any]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        for number, case in enumerate(cases):
            out = Path(directory) / f"{number}.json"
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(case, out, options.updates))
            process.start()
            process.join()
            if process.exitcode:
                failed.append(case.name)
            if out.exists():
                found[case] = json.loads(out.read_text())
            samples = dict(_samples(found, PEAK_FLOPS))
            workload = f"{_NUM_SAMPLES} sequences of {_PROMPT_TOKENS} + {_COMPLETION_TOKENS} tokens an update"
            digests = {one.name: each["digest"] for one, each in found.items()}
            settings = {"workload": workload, "initial weights": digests, "failed": failed, "updates": options.updates}
            keep(options.name, samples, libraries=_libraries(), weights="random", **settings)
    for case, each in found.items():
        if each["loss"][-1] >= each["loss"][0] or not np.isfinite(each["loss"]).all():
            failed.append(f"{case.name}: the loss does not fall")
        plain = found.get(Case("none", case.is_tiny))
        if plain and each["digest"] != plain["digest"]:
            failed.append(f"{case.name}: other published weights before the first update")
    if failed:
        sys.exit(f"benchmarks.fp8: {'; '.join(failed)}")


def _libraries() -> tuple[str, ...]:
    engine = ("transformer_engine",) if torch.cuda.is_available() else ()
    return ("torch", "transformers", "megatron-core", *engine)


def _samples(found: Mapping[Case, Mapping[str, Any]], peak: float) -> Iterator[tuple[str, list[float]]]:
    for case, each in found.items():
        seconds = each["seconds"][_WARM_UP:] or each["seconds"]
        plain = found.get(Case("none", case.is_tiny))
        yield f"{case.name}: update [s]", seconds
        yield f"{case.name}: tokens/s", [each["tokens"] / one for one in seconds]
        yield f"{case.name}: MFU against bfloat16's rate", [each["operations"] / one / peak for one in seconds]
        yield f"{case.name}: peak allocated [GB]", [each["peak_bytes"] / 1e9]
        yield f"{case.name}: loss after each update [nats]", each["loss"]
        if plain and case.fp8 != "none":
            others = plain["seconds"][_WARM_UP:] or plain["seconds"]
            pairs = list(zip(each["loss"], plain["loss"], strict=False))
            yield f"{case.name}: seconds over bf16's", [float(np.median(seconds) / np.median(others))]
            gaps = [one - other for one, other in pairs]
            yield f"{case.name}: loss above bf16's, last {_LAST} updates [nats]", gaps[-_LAST:]
