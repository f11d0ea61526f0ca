"""Makes updates on real trainer ranks, without the service around them: the same scenarios at any world size.

`main` runs one rank; rank 0 writes the results to DIRECTORY.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from lockstep.types.v1.types_pb2 import PolicyStamp
from safetensors.torch import load_file, save_file

from services.common import batches
from services.common.config.trainer import TrainerConfig
from services.trainer.backend import Role
from services.trainer.checkpoint.manifest import begin
from services.trainer.fsdp.loading import reshard
from services.trainer.ranks.worker import Worker
from services.trainer.samples import forward_parts
from tests.support import make_batch, with_routed_experts
from tests.trainer.updating import totals_of, train_whole, whole_parts

KINDS = ("untied", "tied", "moe")
# eps is large against the root of the second moment. Adam divides by the sum of both, and with a small eps would scale
# the rounding of a tiny gradient up to a step of full size. Decay and clipping are on, so that they are compared too.
OPTIM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
BASE = {"compute_dtype": "float32", "max_tokens_per_microbatch": 4096, "max_logprob_diff": 100.0, "optim": OPTIM}
FULL_LOSS = {
    "kl_coef": 0.2,
    "entropy_coef": 0.05,
    "clip_low": 0.1,
    "clip_high": 0.15,
    "aggregation": "seq_mean_token_mean",
}
SMALL = {"max_tokens_per_microbatch": 32}
# Maps a scenario's name to its model kind and its changes to BASE. `large` is one micro-batch on each rank, `small` is
# many.
UPDATES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{kind}-large": (kind, {}) for kind in KINDS},
    **{f"{kind}-small": (kind, SMALL) for kind in KINDS},
    "untied-reduced-each": ("untied", SMALL | {"fsdp": {"reduce_each_microbatch": True}}),
    "recompute": ("untied", SMALL | {"gradient_checkpointing": True}),
    "sum-norm": ("untied", SMALL | {"loss": {"aggregation": "seq_mean_token_sum_norm", "norm_tokens": 20}}),
    "routed_experts-large": ("moe", {}),
    "routed_experts-small": ("moe", SMALL),
    "routed_experts-recompute": ("moe", SMALL | {"gradient_checkpointing": True}),
    "full-large": ("untied", {"num_minibatches": 2, "loss": FULL_LOSS}),
    "full-small": ("untied", SMALL | {"num_minibatches": 2, "loss": FULL_LOSS}),
    "full-small-gathered": (
        "untied",
        SMALL | {"num_minibatches": 2, "loss": FULL_LOSS, "fsdp": {"reshard_after_forward": False}},
    ),
}
TEMPERATURE = 0.7


def samples(seed: int = 0) -> pa.Table:
    """Returns 4 groups of 3 samples, of uneven lengths that cannot be divided evenly over the ranks' microbatches.

    The reference's log-probabilities differ from the engine's by random numbers of size 0.3.
    """
    table = make_batch(4, 3, PolicyStamp(version=0, digest="0" * 32), seed=seed)
    random = np.random.default_rng(seed + 1)
    reference = [[x + float(random.normal(0, 0.3)) for x in row] for row in table["logprobs"].to_pylist()]
    index = table.schema.get_field_index("ref_logprobs")
    return table.set_column(index, table.schema.field(index), pa.array(reference, pa.list_(pa.float32())))


def aligned_samples(seed: int, align: int) -> pa.Table:
    """Returns `samples` with longer prompts: each sequence, without its last token, is a multiple of `align` long.

    The added tokens repeat the prompt from its beginning.
    """
    table = samples(seed)
    prompts, tokens = table["prompt_tokens"].to_pylist(), table["tokens"].to_pylist()
    longer = [p + p[: (1 - len(p) - len(t)) % align] for p, t in zip(prompts, tokens, strict=True)]
    index = table.schema.get_field_index("prompt_tokens")
    return table.set_column(index, table.schema.field(index), pa.array(longer, table.schema.field(index).type))


def batch_of(name: str) -> pa.Table:
    """Returns the samples that the scenario `name` trains on."""
    return with_routed_experts(samples()) if name.startswith("routed_experts") else samples()


def config(changes: Mapping[str, Any] = {}) -> TrainerConfig:
    return TrainerConfig.model_validate({**BASE, **changes})


class Harness:
    """Runs one rank in this process, without the service around it."""

    def __init__(self, store: dist.Store, rank: int, world: int, models: Path):
        self.rank, self.world, self._models = rank, world, models
        self.worker = Worker(store, rank, world, torch.device("cpu"))
        self._config = config()

    def open(self, kind: str, changes: Mapping[str, Any], checkpoint: str = "") -> None:
        self._config = config(changes)
        self.open_role(Role.POLICY, kind, self._config, checkpoint)
        if self._config.loss.kl_coef:
            self.open_role(Role.REFERENCE, kind, self._config)

    def open_role(self, role: Role, kind: str, settings: TrainerConfig, checkpoint: str = "") -> None:
        self.worker.open(
            role=role,
            config_json=settings.model_dump_json(),
            model_path=str(self._models / kind),
            checkpoint_path=checkpoint,
            seed=0,
            bucket_bytes=1 << 20,
        )

    @property
    def backend(self) -> Any:
        return self.worker._backends[Role.POLICY]

    def parameters(self) -> dict[str, torch.Tensor]:
        named = self.backend._model.causal_lm.named_parameters()
        return {name: parameter.detach().full_tensor().clone() for name, parameter in named}

    def train(self, batch: pa.Table, version: int = 0) -> dict[str, float]:
        parts = whole_parts(batch, self._config, self.world, pads_rows=self.backend.pads_rows)
        part, totals = parts[self.rank], totals_of(batch, self._config)
        return train_whole(self.worker, part, totals, version=version, temperature=TEMPERATURE)

    def gradients_of(self, batch: pa.Table) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Trains; returns the gradients of the last optimizer update, before the clip, and the metrics."""
        gradients: dict[str, torch.Tensor] = {}
        backend, step = self.backend, self.backend.step

        def recording(*rates: float) -> float:
            reshard(backend._model)
            named = backend._model.causal_lm.named_parameters()
            trained = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
            gradients.update({name: grad.full_tensor().clone() for name, grad in trained.items()})
            return step(*rates)

        backend.step = recording
        try:
            metrics = self.train(batch)
        finally:
            del backend.step
        return gradients, metrics

    def logprobs(self, batch: pa.Table, role: str = "policy") -> list[np.ndarray] | None:
        """Returns the log-probabilities in the batch's order if this is the only rank, else None."""
        parts, order = forward_parts(batch, self._config, self.world)
        part = parts[self.rank]
        answer = self.worker.forward(role=role, **part.body, frames=part.frames, temperature=TEMPERATURE)
        if self.world > 1:
            return None
        table = batches.decode(answer.frames).take(pa.array(order))
        return [np.array(row, dtype=np.float32) for row in table["logprobs"].to_pylist()]


def write(directory: Path, name: str, tensors: Mapping[str, torch.Tensor], metrics: Mapping[str, float]) -> None:
    # Tied weights are one tensor here; safetensors wants contiguous ones.
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / f"{name}.safetensors")
    (directory / f"{name}.json").write_text(json.dumps(metrics))


def read(directory: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    return load_file(directory / f"{name}.safetensors"), json.loads((directory / f"{name}.json").read_text())


def run_all(harness: Harness, directory: Path) -> None:
    """Runs every scenario of UPDATES, then `_resume`."""
    for name, (kind, changes) in UPDATES.items():
        harness.open(kind, changes)
        gradients, metrics = harness.gradients_of(batch_of(name))
        after = harness.parameters()
        if harness.rank == 0:
            write(directory, f"{name}-gradients", gradients, metrics)
            write(directory, f"{name}-weights", after, metrics)
    for kind in ("adamw", "muon"):
        _resume(harness, directory, kind)
    harness.worker.close()


def _resume(harness: Harness, directory: Path, kind: str) -> None:
    """Makes an update, a checkpoint and the next update; then makes the next update again, from the checkpoint."""
    checkpoint, changes = directory / f"{kind}-checkpoint", {"optim": OPTIM | {"kind": kind}}
    harness.open("tied", changes)
    harness.train(samples())
    if harness.rank == 0:
        begin(checkpoint)
    dist.barrier()
    harness.worker.save(path=str(checkpoint), state={"version": 1, "last_batch_id": "b", "last_metrics": {}})
    metrics = harness.train(samples(seed=5), version=1)
    went_on = harness.parameters()
    dist.barrier()
    harness.open("tied", changes, checkpoint=str(checkpoint))
    harness.train(samples(seed=5), version=1)
    resumed = harness.parameters()
    if harness.rank == 0:
        write(directory, f"{kind}-went-on", went_on, metrics)
        write(directory, f"{kind}-resumed", resumed, metrics)


def main(rank: int, world: int, directory: Path) -> None:
    """Runs one rank of `world` through all scenarios."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world)
    run_all(Harness(store, rank, world, directory.parent / "models"), directory)
