"""Makes updates on real trainer ranks in every Megatron layout, without the service around them.

There are some updates in each layout, of one batch each. `main` forks the ranks of a world from one process that has
imported everything, and runs layouts of that world size. The results lie in DIRECTORY/NAME.{safetensors,json}.
"""

import functools
import gc
import hashlib
import importlib
import multiprocessing
import os
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from services.common.batches import batch as batches
from services.common.config.trainer.roles import ReferenceConfig
from services.common.config.trainer.section import TrainerConfig
from services.common.megatron.layout import data_parallel_size
from services.trainer.backend import Role
from services.trainer.ranks.shards import forward_parts, train_parts
from services.trainer.ranks.worker import Worker
from tests.support import with_routes
from tests.trainer.fsdp_harness import BASE, FULL_LOSS, TEMPERATURE, aligned_samples, write

# This makes three micro-batches on one data-parallel rank, and two on each of two.
SMALL = {"max_tokens_per_microbatch": 64}
# On-policy, the surrogate alone is a mean of advantages and cancels to almost 0; the entropy makes the loss of size 1.
LOSS = {"entropy_coef": 0.5}
# The slots are so small that several ranks send the weights of a tiny model.
_SLOT_BYTES = 1 << 14
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
GATHERED = {"moe": {"token_dispatcher_type": "allgather"}}
VPP = {"virtual_pipeline_model_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
UNPACKED = {"packed_sequences": False}
# A bucket has only a few matrices, so that there are several buckets whose slots overlap.
OVERLAP = {"ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10000}}
AUX = {
    "moe": {"load_balancing_type": "aux_loss", "aux_loss_coeff": 0.1},
    "transformer_config_kwargs": {"moe_z_loss_coeff": 0.01},
}
FULL = SMALL | {"num_minibatches": 2, "num_epochs": 2, "loss": FULL_LOSS}


FAMILIES = (
    "llama",
    "llama-linear",
    "llama-llama3",
    "mistral",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe-unnormalized",
    "mixtral",
    "qwen2_moe",
    "qwen2_moe-normalized",
    "phi3",
)


@dataclass(frozen=True)
class Layout:
    """Describes model kind, parallel sizes, and changes of config; `like` names the layout that results must equal."""

    kind: str
    world: int
    megatron: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    like: str = ""
    align: int = 1
    """All sequences of the batches have a multiple of this many tokens."""
    num_updates: int = 2
    has_routes: bool = False
    """The samples have routes, which are not those that the routers would choose."""
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
        "ep2-gathered": (2, EP | GATHERED),
        "ep4-gathered": (4, {"expert_model_parallel_size": 4} | GATHERED),
        "tp2-ep2-etp1-gathered": (2, TP | EP | GATHERED | {"expert_tensor_parallel_size": 1}),
        "cp2-ep2-gathered": (2, CP | EP | GATHERED),
        "ep2-pp2-gathered": (4, EP | PP | GATHERED),
    }
    for name, (world, megatron) in experts.items():
        yield f"moe-{name}", Layout("moe", world, megatron, SMALL, "moe-1")
    for name, megatron in (("tp2", TP), ("cp2", CP)):
        yield f"untied-{name}-unpacked", Layout("untied", 2, megatron | UNPACKED, SMALL, "untied-1")
    yield "moe-ep2-unpacked", Layout("moe", 2, EP | UNPACKED, SMALL, "moe-1")
    yield "moe-ep2-unpacked-gathered", Layout("moe", 2, EP | UNPACKED | GATHERED, SMALL, "moe-1")
    yield "deep-vpp2", Layout("deep", 2, PP | VPP, SMALL, "deep-1")
    yield "deep-vpp2-unpacked", Layout("deep", 2, PP | VPP | UNPACKED, SMALL, "deep-1")
    yield "deep-vpp2-tp2", Layout("deep", 4, TP | PP | VPP, SMALL, "deep-1")
    yield from _routed()
    yield from _options()


def _routed() -> Iterator[tuple[str, Layout]]:
    """Yields layouts with replayed routes that cut tokens or layers, or compute them again."""
    again = SMALL | {"gradient_checkpointing": True}  # in a pipeline, after the forward passes of other micro-batches
    cases: tuple[tuple[str, int, dict[str, Any], dict[str, Any], str], ...] = (
        ("1", 1, {}, {}, ""),
        ("1-small", 1, {}, SMALL, "1"),
        ("1-recompute", 1, {}, again, "1-small"),
        ("1-recompute-selective", 1, SELECTIVE, again, "1-small"),
        ("tp2", 2, TP, SMALL, "1"),
        ("cp2", 2, CP, SMALL, "1"),
        ("cp2-unpacked", 2, CP | UNPACKED, SMALL, "1"),
        ("ep2", 2, EP, SMALL, "1"),
        ("pp2", 2, PP, again, "1"),
        ("ep2-pp2", 4, EP | PP, SMALL, "1"),
        ("ep2-gathered", 2, EP | GATHERED, again, "1"),
        ("deep-1", 1, {}, SMALL, ""),
        ("deep-vpp2", 2, PP | VPP, again, "deep-1"),
    )
    for name, world, megatron, changes, like in cases:
        kind = "deep-moe" if "deep" in name else "moe"
        yield f"routed-{name}", Layout(kind, world, megatron, changes, like and f"routed-{like}", has_routes=True)


def _options() -> Iterator[tuple[str, Layout]]:
    """Yields layouts for everything besides parallel sizes."""
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
    # The auxiliary loss is that of a micro-batch: this budget makes the same, without padding, on one rank and two.
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
# These run only when they are named; their models are made where they are tested.
FAMILY_LAYOUTS = {
    **{kind: Layout(kind, 1, num_updates=1) for kind in FAMILIES},
    **{
        f"{kind}-{name}": Layout(kind, 2, megatron, SMALL, num_updates=1)
        for kind, splits in (("phi3", {"tp2": TP, "pp2": PP}), ("qwen2_moe", {"tp2": TP, "pp2": PP, "ep2": EP}))
        for name, megatron in splits.items()
    },
    "qwen2_moe-tp2-ep2": Layout("qwen2_moe", 2, TP | EP | {"expert_tensor_parallel_size": 1}, SMALL, num_updates=1),
    "qwen3-bf16": Layout("qwen3-bf16", 1, changes={"compute_dtype": "bfloat16"}, num_updates=0),
    "qwen3_moe-bf16": Layout("qwen3_moe-bf16", 1, changes={"compute_dtype": "bfloat16"}, num_updates=0),
}


def config(layout: Layout) -> TrainerConfig:
    changes = {"strategy": "megatron", "num_ranks": layout.world, "megatron": layout.megatron, **layout.changes}
    changes.pop("reference", None)
    return TrainerConfig.model_validate({**BASE, "loss": LOSS, **changes})


def reference_config(layout: Layout) -> TrainerConfig | None:
    """Returns the reference's config, or None if there is no reference or the policy's base is the reference."""
    policy, own = config(layout), layout.changes.get("reference")
    if not policy.loss.kl_coef or (policy.lora.rank and own is None):
        return None
    return ReferenceConfig.model_validate(own or {}).settings(policy)


def content(tensor: torch.Tensor) -> str:
    # A copy is hashed, as numpy would keep hold of memory that is offloaded next.
    return hashlib.sha256(tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()).hexdigest()


class MegatronHarness:
    """Runs one rank in this process, without the service around it."""

    def __init__(self, store: dist.Store, rank: int, world: int, models: Path):
        self.rank, self.world, self._models = rank, world, models
        self.worker = Worker(store, rank, world, torch.device("cpu"))

    def open(self, layout: Layout, checkpoint: str = "") -> None:
        self.config, self._settings, self._data_ranks = config(layout), {}, {}
        self.open_role(Role.POLICY, layout.kind, self.config, checkpoint)
        if reference := reference_config(layout):
            self.open_role(Role.REFERENCE, layout.kind, reference)
        elif self.config.loss.kl_coef:
            self._settings["reference"] = self.config
            self._data_ranks["reference"] = self._data_ranks["policy"]

    def open_role(self, role: Role, kind: str, settings: TrainerConfig, checkpoint: str = "") -> None:
        answer = self.worker.open(
            role=role,
            config_json=settings.model_dump_json(),
            model_path=str(self._models / kind),
            checkpoint_path=checkpoint,
            seed=0,
            bucket_bytes=1 << 20,
        )
        self._settings[role], self._data_ranks[role] = settings, answer.body["data_rank"]

    @property
    def backend(self) -> Any:
        return self.worker._backends[Role.POLICY]

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns whole weights under checkpoint names, on rank 0."""
        return {name: tensor.clone() for name, tensor in self.backend.weights()}

    def published(self) -> list[tuple[int, str, str]]:
        """Returns the rank, name and content (SHA-256) of every tensor that any rank has to send."""
        if not self.backend.sender_slots(_SLOT_BYTES):
            sent = [(0, name, content(tensor)) for name, tensor in self.backend.weights()]
            return sent if self.rank == 0 else []
        rounds = self.backend.sent_weights(_SLOT_BYTES)
        own = [(name, content(tensor)) for tensors in rounds for name, tensor in tensors]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, own)
        return [(rank, *named) for rank, theirs in enumerate(gathered) for named in theirs]

    def train(self, batch: pa.Table, version: int = 0, role: Role = Role.POLICY) -> dict[str, float]:
        part = train_parts(batch, self._settings[role], self._num_parts(role), role)[self._data_ranks[role]]
        answer = self.worker.train(role=role, **part.body, frames=part.frames, temperature=TEMPERATURE, version=version)
        return answer.body["metrics"]

    def logprobs(self, batch: pa.Table, role: str = "policy") -> list[np.ndarray]:
        return self.forward(batch, role, "logprobs")

    def forward(self, batch: pa.Table, role: str, column: str) -> list[np.ndarray]:
        """Returns `column` of all samples in the batch's order, gathered from all ranks."""
        parts, order = forward_parts(batch, self._settings[role], self._num_parts(role))
        data_rank = self._data_ranks[role]
        part = parts[data_rank]
        answer = self.worker.forward(role=role, **part.body, frames=part.frames, temperature=TEMPERATURE)
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, (data_rank, batches.decode(answer.frames)))
        table = pa.concat_tables([dict(gathered)[rank] for rank in range(len(parts))]).take(pa.array(order))
        return [np.array(row, dtype=np.float32) for row in table[column].to_pylist()]

    def bytes_here(self) -> dict[str, int]:
        """Returns the bytes of device memory of each offloader group; what two of them share counts for the first."""
        found: set[int] = set()
        sums = {}
        for name, tensors in self.backend._offloader._groups.items():
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors()}
            sums[name] = sum(size for key, size in storages.items() if key not in found)
            found |= storages.keys()
        return sums

    def _num_parts(self, role: str) -> int:
        return data_parallel_size(self._settings[role])


def run(harness: MegatronHarness, name: str, directory: Path) -> None:
    """Writes log-probabilities and weights before and after some updates, between which nothing asks for weights."""
    layout = (LAYOUTS | FAMILY_LAYOUTS)[name]

    def batch(seed: int) -> pa.Table:
        table = aligned_samples(seed, layout.align)
        return with_routes(table, num_layers=4 if layout.kind == "deep-moe" else 2) if layout.has_routes else table

    harness.open(layout)
    num_threads, num_files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    here = [harness.bytes_here()]
    before = harness.weights()
    here.append(harness.bytes_here())
    published = harness.published()
    logprobs = harness.logprobs(batch(0))
    if layout.has_broken_norms:
        for parameter in harness.backend._model.chunks[0].parameters():
            parameter.sequence_parallel = False
    metrics = []
    for seed in range(layout.num_updates):
        metrics.append(harness.train(batch(seed), version=seed))
        here.append(harness.bytes_here())
    after_logprobs = harness.logprobs(batch(0))
    here.append(harness.bytes_here())
    after = harness.weights()
    reference = harness.logprobs(batch(0), role="reference") if harness.config.loss.kl_coef else []
    if harness.rank == 0:
        answers = {"logprobs": _lists(logprobs), "reference": _lists(reference), "published": published}
        write(directory, f"{name}-before", before, answers)
        answers = {"logprobs": _lists(after_logprobs), "updates": metrics, "bytes_here": here}
        answers |= {"num_threads": num_threads, "num_files": num_files}
        write(directory, f"{name}-after", after, answers)


def _lists(rows: list[np.ndarray]) -> list[list[float]]:
    return [row.tolist() for row in rows]


def run_all(
    harness: MegatronHarness,
    directory: Path,
    names: Iterable[str],
    run: Callable[[MegatronHarness, str, Path], None] = run,
) -> None:
    """Runs every layout of `names`; an error says which layout it was."""
    for name in names:
        try:
            run(harness, name, directory)
        except Exception as error:
            error.add_note(f"layout {name}")
            raise


def run_ranks(world: int, directory: Path, act: Callable[[MegatronHarness], None]) -> list[int | None]:
    """Forks `world` ranks from this process, each of which runs `act`; returns their exit codes.

    When a rank ends with another code than 0, the others, which would wait for it, are killed. An error is written to
    DIRECTORY/world<n>-rank<n>.error; the models are those beside DIRECTORY.
    """
    directory.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for backend in ("megatron", "fsdp"):  # takes seconds, so it is done once and not in every rank
        importlib.import_module(f"services.trainer.{backend}.backend")
    gc.freeze()  # or each garbage collection of a rank, as when it opens a role, would go through all that is imported
    store = directory / f"store-{uuid.uuid4().hex}"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(store, rank, world, act)) for rank in range(world)]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()  # it may still be ending
            if ended.exitcode:
                for other in running.values():
                    other.kill()
    return [process.exitcode for process in ranks]


def _rank(store: Path, rank: int, world: int, act: Callable[[MegatronHarness], None]) -> None:
    directory = store.parent
    harness = MegatronHarness(dist.FileStore(str(store), world), rank, world, directory.parent / "models")
    try:
        act(harness)
        harness.worker.close()
    except BaseException:
        (directory / f"world{world}-rank{rank}.error").write_text(traceback.format_exc())
        raise


def main(world: int, directory: Path, names: Sequence[str]) -> int:
    """Runs the layouts of `names` on `world` ranks; returns 0 if every rank came to its end, else 1."""
    return int(any(run_ranks(world, directory, functools.partial(run_all, directory=directory, names=names))))
