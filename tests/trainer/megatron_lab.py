"""Real Megatron ranks in every layout, without the service around them: three updates of one batch each.

`python -m tests.trainer.megatron_lab WORLD DIRECTORY` forks WORLD ranks from one process, which has imported everything,
and runs all layouts of that world size. What came out lies in DIRECTORY/NAME.{safetensors,json}.
"""

import json
import multiprocessing
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from services.common import batch as batches
from services.common.config.trainer import TrainerConfig
from services.trainer.megatron.backend import MegatronBackend  # noqa: F401  (imported before the ranks fork)
from services.trainer.shards import forward_parts, train_parts
from services.trainer.worker import Worker
from tests.trainer.fsdp_lab import BASE, SMALL, TEMPERATURE, samples, write

NUM_UPDATES = 3
# On-policy, the surrogate alone is a mean of advantages and cancels to almost 0; the entropy makes the loss of size 1.
LOSS = {"entropy_coef": 0.5}
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
VPP = {"virtual_pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class Layout:
    """A model kind, parallel sizes, and changes to the trainer's config."""

    kind: str
    world: int
    megatron: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


def _layouts() -> Iterator[tuple[str, Layout]]:
    for kind in ("untied", "tied", "moe", "deep"):
        yield f"{kind}-1", Layout(kind, 1)
        yield f"{kind}-1-small", Layout(kind, 1, changes=SMALL)
        yield f"{kind}-1-unpacked", Layout(kind, 1, {"packed_sequences": False}, SMALL)
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
            yield f"{kind}-{name}", Layout(kind, world, megatron, SMALL)
        for name, megatron in (("tp2", TP), ("cp2", CP), ("pp2", PP)):
            yield f"{kind}-{name}-unpacked", Layout(kind, 2, megatron | {"packed_sequences": False}, SMALL)
    experts: dict[str, tuple[int, dict[str, Any]]] = {
        "dp2": (2, {}),
        "tp2": (2, TP),
        "pp2": (2, PP),
        "cp2": (2, CP),
        "ep2": (2, EP),
        "tp2-ep2-etp1": (2, TP | EP | {"expert_tensor_parallel_size": 1}),
        "ep2-etp2": (4, TP | EP),
        "ep2-pp2": (4, EP | PP),
    }
    for name, (world, megatron) in experts.items():
        yield f"moe-{name}", Layout("moe", world, megatron, SMALL)
    for name, world, megatron in (("vpp2", 2, PP | VPP), ("vpp2-unpacked", 2, PP | VPP | {"packed_sequences": False})):
        yield f"deep-{name}", Layout("deep", world, megatron, SMALL)


LAYOUTS = dict(_layouts())


def config(layout: Layout) -> TrainerConfig:
    changes = {"strategy": "megatron", "num_ranks": layout.world, "megatron": layout.megatron, **layout.changes}
    return TrainerConfig.model_validate({**BASE, "loss": LOSS, **changes})


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
        megatron = self.config.megatron
        model_ranks = (
            megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
        )
        self.data_rank, self.num_data_ranks = answer.body["data_ranks"]["policy"], self.world // model_ranks

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, in checkpoint names, on rank 0."""
        return {name: tensor.clone() for name, tensor in self.worker._backend.weights()}

    def train(self, batch: pa.Table, version: int = 0) -> dict[str, float]:
        part = train_parts(batch, self.config, self.num_data_ranks)[self.data_rank]
        answer = self.worker.train(**part.body, frames=part.frames, temperature=TEMPERATURE, version=version)
        return answer.body["metrics"]

    def logprobs(self, batch: pa.Table) -> list[np.ndarray]:
        """Of all samples in the batch's order, from all ranks."""
        parts, order = forward_parts(batch, self.config, self.num_data_ranks)
        part = parts[self.data_rank]
        answer = self.worker.forward(role="policy", **part.body, frames=part.frames, temperature=TEMPERATURE)
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, (self.data_rank, batches.decode(answer.frames)))
        table = pa.concat_tables([dict(gathered)[rank] for rank in range(self.num_data_ranks)]).take(pa.array(order))
        return [np.array(row, dtype=np.float32) for row in table["logprobs"].to_pylist()]


def run(lab: MegatronLab, name: str, directory: Path) -> None:
    """Log-probabilities and weights before, NUM_UPDATES updates, weights after."""
    lab.open(LAYOUTS[name])
    before = lab.weights()
    logprobs = lab.logprobs(samples())
    metrics = [lab.train(samples(seed), version=seed) for seed in range(NUM_UPDATES)]
    after = lab.weights()
    if lab.rank == 0:
        write(directory, f"{name}-before", before, {"logprobs": [row.tolist() for row in logprobs]})
        write(directory, f"{name}-after", after, {"updates": metrics})


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
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, world, directory, names)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            for other in ranks:
                other.kill()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    _world = int(sys.argv[1])
    _names = sys.argv[3:] or [name for name, layout in LAYOUTS.items() if layout.world == _world]
    sys.exit(main(_world, Path(sys.argv[2]), _names))
