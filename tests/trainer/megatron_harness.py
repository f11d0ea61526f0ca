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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from services.common import batches
from services.common.config.layout import data_parallel_size
from services.common.config.trainer import ReferenceConfig, TrainerConfig
from services.common.weights.buckets import Computed, Items, Span
from services.trainer.backend import Role
from services.trainer.megatron import weights as weight_map
from services.trainer.ranks.worker import Worker
from services.trainer.samples import forward_parts
from tests.support import VOCAB, with_routed_experts
from tests.trainer.fsdp_harness import BASE, TEMPERATURE, aligned_samples, write
from tests.trainer.megatron_layouts import FAMILY_LAYOUTS, LAYOUTS, LOSS, Layout
from tests.trainer.updating import totals_of, train_whole, whole_parts

# The slots are so small that several ranks send the weights of a tiny model.
_SLOT_BYTES = 1 << 14
weight_map.EXPERT_BLOCKS = 2  # of four experts


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
        self.most_sent_together = 1
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
        shapes = {name: spec.shape for name, spec in self.backend.weight_specs()}
        if not self.backend.sender_slots(_SLOT_BYTES):
            sent = [(0, name, content(tensor)) for name, tensor in self._one_by_one(self.backend.spans(), shapes)]
            return sent if self.rank == 0 else []
        rounds = self.backend.sent_weights(_SLOT_BYTES)
        own = [(name, content(tensor)) for items in rounds for name, tensor in self._one_by_one(items, shapes)]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, own)
        return [(rank, *named) for rank, theirs in enumerate(gathered) for named in theirs]

    def _one_by_one(self, items: Items, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor of spans by itself, and notes the most that a span has."""
        for item in items:
            if isinstance(item, Span):
                self.most_sent_together = max(self.most_sent_together, len(item.names))
                parts = item.flat.split([shapes[name].numel() for name in item.names])
                yield from ((name, part.view(shapes[name])) for name, part in zip(item.names, parts, strict=True))
            else:
                name, value = item
                if isinstance(value, Computed):
                    value.write(written := torch.empty_like(value.like))
                    value = written
                yield name, value

    def train(self, batch: pa.Table, version: int = 0, role: Role = Role.POLICY) -> dict[str, float]:
        settings = self._settings[role]
        part = whole_parts(batch, settings, self._num_parts(role), role)[self._data_ranks[role]]
        totals = totals_of(batch, settings)
        return train_whole(self.worker, part, totals, version=version, role=role, temperature=TEMPERATURE)

    def logprobs(self, batch: pa.Table, role: str = "policy") -> list[np.ndarray]:
        return self.forward(batch, role, "logprobs")

    def forward(self, batch: pa.Table, role: str, column: str) -> list[np.ndarray]:
        """Returns `column` of all samples in the batch's order, gathered from all ranks."""
        return [np.array(row, dtype=np.float32) for row in self._forward(batch, role)[column].to_pylist()]

    def top_k(self, batch: pa.Table, role: str, k: int) -> list[bytes]:
        """Returns the encoded k most probable tokens of all samples."""
        return self._forward(batch, role, top_k=(k, VOCAB))["top_k"].to_pylist()

    def _forward(self, batch: pa.Table, role: str, **more: Any) -> pa.Table:
        parts, order = forward_parts(batch, self._settings[role], self._num_parts(role))
        data_rank = self._data_ranks[role]
        part = parts[data_rank]
        answer = self.worker.forward(role=role, **part.body, frames=part.frames, temperature=TEMPERATURE, **more)
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, (data_rank, batches.decode(answer.frames)))
        return pa.concat_tables([dict(gathered)[rank] for rank in range(len(parts))]).take(pa.array(order))

    def bytes_here(self) -> dict[str, int]:
        """Returns the bytes of device memory of each offloader group; what two of them share counts for the first."""
        counted_storages: set[int] = set()
        sums = {}
        for name, tensors in self.backend.offloader._groups.items():
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors()}
            sums[name] = sum(size for key, size in storages.items() if key not in counted_storages)
            counted_storages |= storages.keys()
        return sums

    def _num_parts(self, role: str) -> int:
        return data_parallel_size(self._settings[role])


def run(harness: MegatronHarness, name: str, directory: Path) -> None:
    """Writes log-probabilities and weights before and after some updates, between which nothing asks for weights."""
    layout = (LAYOUTS | FAMILY_LAYOUTS)[name]

    def batch(seed: int) -> pa.Table:
        table = aligned_samples(seed, layout.align)
        return (
            with_routed_experts(table, num_layers=4 if layout.kind == "deep-moe" else 2)
            if layout.has_routed_experts
            else table
        )

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
    after = harness.weights()  # at once, as a publication reads them: a forward pass would gather what was updated
    after_logprobs = harness.logprobs(batch(0))
    here.append(harness.bytes_here())
    reference = harness.logprobs(batch(0), role="reference") if harness.config.loss.kl_coef else []
    if harness.rank == 0:
        answers = {"logprobs": _lists(logprobs), "reference": _lists(reference), "published": published}
        answers["most_sent_together"] = harness.most_sent_together
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
