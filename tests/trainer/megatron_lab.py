"""Real Megatron ranks in every layout, without the service around them: some updates of one batch each.

`python -m tests.trainer.megatron_lab WORLD DIRECTORY` forks WORLD ranks from one process that has imported everything,
and runs all layouts of that world size. What came out lies in DIRECTORY/NAME.{safetensors,json}.
"""

import functools
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from services.common import batch as batches
from services.common.config.trainer import TrainerConfig
from services.common.layout import data_parallel_size
from services.trainer.backend import Role
from services.trainer.shards import forward_parts, train_parts
from services.trainer.worker import Worker
from tests.trainer.fsdp_lab import BASE, FULL_LOSS, SMALL, TEMPERATURE, samples, write

# On-policy, the surrogate alone is a mean of advantages and cancels to almost 0; the entropy makes the loss of size 1.
LOSS = {"entropy_coef": 0.5}
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
VPP = {"virtual_pipeline_model_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
UNPACKED = {"packed_sequences": False}
# Buckets of a few matrices, so that there are several whose turns overlap.
OVERLAP = {"ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10000}}
AUX = {"moe": {"load_balancing_type": "aux_loss", "aux_loss_coeff": 0.1}}
FULL = SMALL | {"num_minibatches": 2, "loss": FULL_LOSS}


FAMILIES = (
    "llama",
    "llama-linear",
    "llama-llama3",
    "mistral",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe-unnormalised",
    "mixtral",
)


@dataclass(frozen=True)
class Layout:
    """A model kind, parallel sizes, and changes to the trainer's config. `like` names what the results must equal."""

    kind: str
    world: int
    megatron: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    like: str = ""
    align: int = 1
    """All sequences of the batches have a multiple of this many tokens."""
    num_updates: int = 3
    has_broken_norms: bool = False
    """The gradients of the norms are not summed over the tensor-parallel ranks."""


def _layouts() -> Iterator[tuple[str, Layout]]:
    for kind in ("untied", "tied", "moe", "deep"):
        yield f"{kind}-1", Layout(kind, 1)
        yield f"{kind}-1-small", Layout(kind, 1, {}, SMALL, f"{kind}-1")
    for kind in ("untied", "moe"):
        yield f"{kind}-1-unpacked", Layout(kind, 1, UNPACKED, SMALL, f"{kind}-1")
    dense: dict[str, tuple[int, dict[str, Any]]] = {
        "tp2": (2, TP),
        "pp2": (2, PP),
        "cp2": (2, CP),
        "dp2": (2, {}),
        "dp2-plain": (2, {"use_distributed_optimizer": False}),
        "tp2-pp2": (4, TP | PP),
        "pp2-dp2": (4, PP),
        "tp2-cp2": (4, TP | CP),
    }
    for kind in ("untied", "tied"):
        for name, (world, megatron) in dense.items():
            yield f"{kind}-{name}", Layout(kind, world, megatron, SMALL, f"{kind}-1")
    experts: dict[str, tuple[int, dict[str, Any]]] = {
        "ep2": (2, EP),
        "tp2-ep2-etp1": (2, TP | EP | {"expert_tensor_parallel_size": 1}),
        "ep2-etp2": (4, TP | EP),
        "ep2-pp2": (4, EP | PP),
    }
    for name, (world, megatron) in experts.items():
        yield f"moe-{name}", Layout("moe", world, megatron, SMALL, "moe-1")
    for name, megatron in (("tp2", TP), ("cp2", CP)):
        yield f"untied-{name}-unpacked", Layout("untied", 2, megatron | UNPACKED, SMALL, "untied-1")
    yield "moe-ep2-unpacked", Layout("moe", 2, EP | UNPACKED, SMALL, "moe-1")
    yield "deep-vpp2", Layout("deep", 2, PP | VPP, SMALL, "deep-1")
    yield "deep-vpp2-unpacked", Layout("deep", 2, PP | VPP | UNPACKED, SMALL, "deep-1")
    yield "deep-vpp2-tp2", Layout("deep", 4, TP | PP | VPP, SMALL, "deep-1")
    yield from _options()


def _options() -> Iterator[tuple[str, Layout]]:
    """Everything besides parallel sizes."""
    yield "untied-tp2-no-sp", Layout("untied", 2, TP | {"sequence_parallel": False}, SMALL, "untied-1")
    yield "untied-dp2-overlap", Layout("untied", 2, OVERLAP, SMALL, "untied-1")
    yield "tied-pp2-dp2-overlap", Layout("tied", 4, PP | OVERLAP, SMALL, "tied-1")
    yield "moe-ep2-overlap", Layout("moe", 2, EP | OVERLAP, SMALL, "moe-1")
    yield "untied-tp2-broken", Layout("untied", 2, TP, SMALL, "untied-1", num_updates=1, has_broken_norms=True)
    recompute = SMALL | {"gradient_checkpointing": True}
    yield "moe-1-recompute", Layout("moe", 1, {}, recompute, "moe-1-small")
    yield "moe-1-recompute-selective", Layout("moe", 1, SELECTIVE, recompute, "moe-1-small")
    yield "untied-tp2-recompute", Layout("untied", 2, TP, recompute, "untied-tp2")
    yield "untied-1-full", Layout("untied", 1, {}, FULL)
    other = {"reference": {"megatron": PP}}
    yield "untied-tp2-full", Layout("untied", 2, TP, FULL, "untied-1-full")
    yield (
        "untied-tp2-full-reference-dp2",
        Layout("untied", 2, TP, FULL | {"reference": {"megatron": {}}}, "untied-1-full"),
    )
    yield "untied-cp2-full-reference-pp2", Layout("untied", 2, CP, FULL | other, "untied-1-full")
    frozen = {"moe": {"freeze_router": True}}
    yield "moe-1-frozen", Layout("moe", 1, frozen, SMALL)
    yield "moe-ep2-frozen", Layout("moe", 2, EP | frozen, SMALL, "moe-1-frozen")
    # The loss is one of a micro-batch: this budget makes the same ones on one rank and on two, without any padding.
    same = {"max_tokens_per_microbatch": 40}
    yield "moe-1-aux", Layout("moe", 1, AUX, same, align=4)
    for name, megatron in (("dp2", {}), ("tp2", TP), ("pp2", PP), ("cp2", CP), ("ep2", EP)):
        yield f"moe-{name}-aux", Layout("moe", 2, AUX | megatron, same, "moe-1-aux", align=4)
    for name in ("param_offload", "grad_offload", "optimizer_offload", "auto_offload"):
        yield f"untied-dp2-{name}", Layout("untied", 2, {name: True}, SMALL, "untied-dp2")
    plain = {"use_distributed_optimizer": False}
    yield (
        "untied-dp2-plain-auto_offload",
        Layout("untied", 2, plain | {"auto_offload": True}, SMALL, "untied-dp2-plain"),
    )
    yield "untied-1-bf16", Layout("untied", 1, {}, SMALL | {"compute_dtype": "bfloat16"})
    yield (
        "untied-1-bf16-auto_offload",
        Layout("untied", 1, {"auto_offload": True}, SMALL | {"compute_dtype": "bfloat16"}, "untied-1-bf16"),
    )


LAYOUTS = dict(_layouts())
# Run when they are named only; their models are made where they are tested.
FAMILY_LAYOUTS = {
    **{kind: Layout(kind, 1, num_updates=1) for kind in FAMILIES},
    "qwen3-bf16": Layout("qwen3-bf16", 1, changes={"compute_dtype": "bfloat16"}, num_updates=0),
    "qwen3_moe-bf16": Layout("qwen3_moe-bf16", 1, changes={"compute_dtype": "bfloat16"}, num_updates=0),
}


def config(layout: Layout) -> TrainerConfig:
    changes = {"strategy": "megatron", "num_ranks": layout.world, "megatron": layout.megatron, **layout.changes}
    return TrainerConfig.model_validate({**BASE, "loss": LOSS, **changes})


def aligned_samples(seed: int, align: int) -> pa.Table:
    """`samples`, prompts made longer until each sequence, without its last token, is a multiple of `align`."""
    table = samples(seed)
    prompts, tokens = table["prompt_tokens"].to_pylist(), table["tokens"].to_pylist()
    longer = [p + p[: (1 - len(p) - len(t)) % align] for p, t in zip(prompts, tokens, strict=True)]
    index = table.schema.get_field_index("prompt_tokens")
    return table.set_column(index, table.schema.field(index), pa.array(longer, table.schema.field(index).type))


class MegatronLab:
    """One rank."""

    def __init__(self, store: dist.Store, rank: int, world: int, models: Path):
        self.rank, self.world, self._models = rank, world, models
        self.worker = Worker(store, rank, world, torch.device("cpu"))

    def open(self, layout: Layout, checkpoint: str = "") -> None:
        self.config = config(layout)
        answer = self.worker.open(
            config_json=self.config.model_dump_json(),
            model_path=str(self._models / layout.kind),
            checkpoint_path=checkpoint,
            seed=0,
            bucket_bytes=1 << 20,
        )
        self._data_ranks = answer.body["data_ranks"]

    @property
    def backend(self) -> Any:
        return self.worker._backend

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, in checkpoint names, on rank 0."""
        return {name: tensor.clone() for name, tensor in self.backend.weights()}

    def train(self, batch: pa.Table, version: int = 0) -> dict[str, float]:
        parts = train_parts(batch, self.config, self._num_parts("policy"))
        part = parts[self._data_ranks["policy"]]
        answer = self.worker.train(**part.body, frames=part.frames, temperature=TEMPERATURE, version=version)
        return answer.body["metrics"]

    def logprobs(self, batch: pa.Table, role: str = "policy") -> list[np.ndarray]:
        """Of all samples in the batch's order, from all ranks."""
        parts, order = forward_parts(batch, self.config, self._num_parts(role), Role(role))
        data_rank = self._data_ranks[role]
        part = parts[data_rank]
        answer = self.worker.forward(role=role, **part.body, frames=part.frames, temperature=TEMPERATURE)
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, (data_rank, batches.decode(answer.frames)))
        table = pa.concat_tables([dict(gathered)[rank] for rank in range(len(parts))]).take(pa.array(order))
        return [np.array(row, dtype=np.float32) for row in table["logprobs"].to_pylist()]

    def bytes_here(self) -> dict[str, int]:
        """Device memory of each of the offloader's groups; what two of them share counts for the first."""
        found: set[int] = set()
        sums = {}
        for name, tensors in self.backend._offloader._groups.items():
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors()}
            sums[name] = sum(size for key, size in storages.items() if key not in found)
            found |= storages.keys()
        return sums

    def _num_parts(self, role: str) -> int:
        megatron = self.config.megatron
        if role == "reference" and self.config.reference.megatron is not None:
            megatron = self.config.reference.megatron
        return data_parallel_size(self.config, megatron)


def run(lab: MegatronLab, name: str, directory: Path) -> None:
    """Log-probabilities and weights before and after some updates; between the updates nothing asks for the weights."""
    layout = (LAYOUTS | FAMILY_LAYOUTS)[name]
    batch = functools.partial(aligned_samples, align=layout.align)
    lab.open(layout)
    num_threads, num_files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    here = [lab.bytes_here()]
    before = lab.weights()
    here.append(lab.bytes_here())
    logprobs = lab.logprobs(batch(0))
    if layout.has_broken_norms:
        for parameter in lab.backend._policy.chunks[0].parameters():
            parameter.sequence_parallel = False
    metrics = []
    for seed in range(layout.num_updates):
        metrics.append(lab.train(batch(seed), version=seed))
        here.append(lab.bytes_here())
    after_logprobs = lab.logprobs(batch(0))
    here.append(lab.bytes_here())
    after = lab.weights()
    reference = lab.logprobs(batch(0), role="reference") if lab.config.loss.kl_coef else []
    if lab.rank == 0:
        write(directory, f"{name}-before", before, {"logprobs": _lists(logprobs), "reference": _lists(reference)})
        answers = {"logprobs": _lists(after_logprobs), "updates": metrics, "bytes_here": here}
        answers |= {"num_threads": num_threads, "num_files": num_files}
        write(directory, f"{name}-after", after, answers)


def _lists(rows: list[np.ndarray]) -> list[list[float]]:
    return [row.tolist() for row in rows]


def _rank(rank: int, world: int, directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / f"store-{world}"), world)
    lab = MegatronLab(store, rank, world, directory.parent / "models")
    for name in names:
        try:
            run(lab, name, directory)
        except Exception:
            (directory / f"{name}-{rank}.error").write_text(traceback.format_exc())
            raise
    lab.worker.close()


def main(world: int, directory: Path, names: list[str]) -> int:
    """0 if every rank came to its end."""
    directory.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    importlib.import_module("services.trainer.megatron.backend")  # seconds: once, not in every rank
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, world, directory, names)) for rank in range(world)]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            if running.pop(sentinel).exitcode:  # the others would wait for it
                for other in running.values():
                    other.kill()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    _world = int(sys.argv[1])
    _names = sys.argv[3:] or [name for name, layout in LAYOUTS.items() if layout.world == _world]
    sys.exit(main(_world, Path(sys.argv[2]), _names))
