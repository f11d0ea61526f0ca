"""Runs every policy loss on real trainer ranks in layouts of both backends.

One process imports everything and forks the ranks of one world after the other. A layout is opened once; every loss
then has one update of two mini-batches, from the same weights. The results lie in DIRECTORY/NAME.{safetensors,json}.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch

from services.common import batches
from services.common.batches import decode_top_k, trained_tokens
from services.trainer.backend import Role
from services.trainer.losses.kinds import Tokens
from tests.support import with_sampling_masks, with_teacher_top_k
from tests.trainer import fsdp_harness
from tests.trainer.fsdp_harness import SMALL, write
from tests.trainer.megatron_harness import MegatronHarness, config, run_all, run_ranks
from tests.trainer.megatron_layouts import CP, PP, TP, Layout
from tests.trainer.updating import counts_of

# Every kind of loss, with bounds that many of the tokens or sequences meet.
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {
        "kl_coef": 0.2,
        "entropy_coef": 0.05,
        "clip_low": 0.1,
        "clip_high": 0.15,
        "aggregation": "seq_mean_token_mean",
    },
    "ppo": {"kind": "ppo", "clip_dual": 1.05, "clip_high": 0.02, "kl_coef": 0.1, "kl_kind": "k2"},
    "gspo": {
        "kind": "gspo",
        "gspo": {"clip_low": 0.01, "clip_high": 0.01},
        "aggregation": "seq_mean_token_mean",
        "correction": {"weight": "sequence", "geometric_mask": (0.4, 1.5)},
    },
    "gspo-token": {
        "kind": "gspo",
        "gspo": {"clip_low": 0.01, "clip_high": 0.01},
        "old_logprobs": "engine",
        "entropy_coef": 0.05,
    },
    "gmpo": {
        "kind": "gmpo",
        "gmpo": {"clip_low": 0.1, "clip_high": 0.15},
        "old_logprobs": "engine",
        "aggregation": "seq_mean_token_mean",
    },
    "python": {
        "kind": "python",
        "import_path": "tests.user_functions:soft_clip",
        "kwargs": {"temperature": 2.0},
        "aggregation": "seq_mean_token_mean",
    },
    "cispo": {
        "kind": "cispo",
        "cispo": {"max_ratio": 1.02},
        "correction": {"weight": "token", "weight_cap": 1.2, "token_mask": (0.1, 5.0), "veto": 0.01},
    },
    "sapo": {
        "kind": "sapo",
        "sapo": {"tau_negative": 3.0},
        "aggregation": "seq_mean_token_mean",
        "kl_coef": 0.1,
        "kl_kind": "abs",
    },
    "clip_cov": {
        "kind": "clip_cov",
        "clip_cov": {"min_covariance": 0.1},
        "clip_low": 0.02,
        "aggregation": "seq_mean_token_sum",
    },
    "kl_cov": {
        "kind": "kl_cov",
        "kl_cov": {"min_covariance": 0.1},
        "entropy_coef": 0.05,
        "correction": {"geometric_mask": (0.4, 1.5), "token_mask": (0.1, 5.0)},
    },
    "dppo-tv": {
        "kind": "dppo",
        "dppo": {"threshold": 0.002},
        "old_logprobs": "engine",
        "aggregation": "seq_mean_token_sum_norm",
        "norm_tokens": 10,
    },
    "dppo-kl": {
        "kind": "dppo",
        "dppo": {"threshold": 1e-4, "divergence": "kl"},
        "correction": {"weight": "sequence", "weight_cap": 1.5, "veto": 0.05},
    },
    "reinforce": {
        "kind": "reinforce",
        "aggregation": "seq_mean_token_sum_norm",
        "norm_tokens": 10,
        "kl_coef": 0.1,
        "kl_kind": "k1",
        "correction": {"weight": "sequence", "geometric_mask": (0.4, 1.5)},
    },
    "sampling_mask": {"kl_coef": 0.2, "entropy_coef": 0.05, "clip_low": 0.1, "clip_high": 0.15},
    "distill": {"distill": {"coef": 0.5, "top_k": 6}, "clip_low": 0.1, "clip_high": 0.15, "entropy_coef": 0.05},
    "distill-forward": {
        "distill": {"coef": 0.5, "top_k": 6, "kl": "forward"},
        "clip_low": 0.1,
        "clip_high": 0.15,
        "aggregation": "seq_mean_token_mean",
    },
    "sft": {"kind": "sft", "aggregation": "seq_mean_token_mean", "entropy_coef": 0.05},
}
# Adam with betas of 0 and an eps that is large against the gradient is SGD at a rate of lr / eps. A weight then moves
# by its gradient, whose rounding is neither hidden behind a sign nor scaled up, and there is no state to put back.
# Decay and clipping are on, so that they are compared too.
OPTIM = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1.0, "weight_decay": 0.01, "max_grad_norm": 0.5}
# As many as the sampling mask of a place has tokens at most.
TOP_K = 8
HALVES = {"num_minibatches": 2, "optim": OPTIM}
FSDP = HALVES | {"strategy": "fsdp"}
REFERENCE = "fsdp-1"
# On one data-parallel rank, SMALL makes three micro-batches of a mini-batch and MEDIUM two; the reference has one.
MEDIUM = {"max_tokens_per_microbatch": 64}
LAYOUTS = {
    REFERENCE: Layout("untied", 1, {}, FSDP),
    "fsdp-1-small": Layout("untied", 1, {}, FSDP | SMALL),
    "fsdp-2": Layout("untied", 2, {}, FSDP | SMALL),
    "megatron-1": Layout("untied", 1, {}, HALVES),
    "megatron-1-small": Layout("untied", 1, {}, HALVES | SMALL),
    "dp2": Layout("untied", 2, {}, HALVES | SMALL),
    "tp2": Layout("untied", 2, TP, HALVES),
    "cp2": Layout("untied", 2, CP, HALVES | MEDIUM),
    "pp2": Layout("untied", 2, PP, HALVES | MEDIUM),
    "dp2-cp2": Layout("untied", 4, CP, HALVES | SMALL),
}
# Only make test-long runs these layouts: others have what they have, each together with something else.
LONG = {"fsdp-1-small", "megatron-1", "megatron-1-small", "dp2-cp2"}
# And in layouts but these only some losses: of sequences, of the vocabulary, of single tokens, of each aggregation.
WHOLE = {REFERENCE, "fsdp-2", "cp2"}
FEW = {"grpo", "gspo-token", "clip_cov", "dppo-tv", "sampling_mask", "distill", "sft"}


def samples() -> pa.Table:
    """Returns the samples of fsdp_harness with loss masks, of which one masks a whole sample, and another engine.

    The engine's log-probabilities are off by random numbers of size 0.5.
    """
    table, random = fsdp_harness.samples(), np.random.default_rng(7)
    counts = [len(row) for row in table["tokens"].to_pylist()]
    masks = [(random.random(count) < 0.7).tolist() for count in counts]
    masks[4] = [False] * counts[4]
    logprobs = [[x + float(random.normal(0, 0.5)) for x in row] for row in table["logprobs"].to_pylist()]
    for name, rows in (("loss_mask", masks), ("logprobs", logprobs)):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))
    return table


def batch_of(loss: str) -> pa.Table:
    """Returns the samples that `loss` is computed on. Some were sampled with truncation; some have a teacher."""
    table = with_sampling_masks(samples()) if loss in ("sampling_mask", "distill-forward") else samples()
    return with_teacher_top_k(table) if "distill" in loss else table


@contextlib.contextmanager
def mean_of_ranks(harness: MegatronHarness) -> Iterator[None]:
    """Makes a mistake: every rank divides by its own counts, and the quotients are averaged over the ranks."""
    worker = harness.worker
    add, apply, counts = worker.add_block, worker.apply_batch, []

    def counting(*, minibatches: list[tuple[int, list[int]]], frames: Any, **more: Any) -> Any:
        table, begin = batches.decode(frames), 0
        for _, sizes in minibatches:
            counts.append(counts_of(trained_tokens(table.slice(begin, sum(sizes)))))
            begin += sum(sizes)
        return add(minibatches=minibatches, frames=frames, **more)

    def of_own_counts(*, totals: list[dict[str, int]], **more: Any) -> Any:
        own = [{name: harness.world * count for name, count in one.items()} for one in counts]
        counts.clear()
        return apply(totals=own, **more)

    patches = {"add_block": counting, "apply_batch": of_own_counts}
    with mock.patch.multiple(worker, **patches):
        yield


@contextlib.contextmanager
def means_of_chunks(_: MegatronHarness) -> Iterator[None]:
    """Makes a mistake: the mean of a sequence is that of the part that this context-parallel rank holds."""
    from services.trainer.megatron.microbatch import MicrobatchShard

    whole, last = MicrobatchShard.whole, []

    def remembered(shard: MicrobatchShard, *rest: Any) -> torch.Tensor:
        last[:] = [shard.where_M]
        return whole(shard, *rest)

    def own_mean(tokens: Tokens, values_N: torch.Tensor) -> torch.Tensor:
        is_own_N = torch.zeros_like(values_N).index_fill(0, last[0], 1)
        own = replace(tokens, columns=tokens.columns | {"loss_mask": tokens.columns["loss_mask"] * is_own_N})
        return own.sequence_sum(values_N) / own.sequence_sum(torch.ones_like(values_N)).clamp(min=1)

    with mock.patch.object(MicrobatchShard, "whole", remembered), mock.patch.object(Tokens, "sequence_mean", own_mean):
        yield


# Maps a layout to a mistake, and to the losses that must show it.
MISTAKES: dict[str, tuple[Callable[[MegatronHarness], Any], list[str]]] = {
    "fsdp-2": (mean_of_ranks, ["grpo", "ppo"]),
    "dp2": (mean_of_ranks, ["grpo", "ppo"]),
    "cp2": (means_of_chunks, ["gspo-token", "gmpo", "kl_cov"]),
}


def tensors_of(backend: Any) -> list[torch.Tensor]:
    """Returns this rank's part of every parameter, not copies: to write to them changes the model."""
    model = backend._model
    if isinstance(model, torch.nn.Module):
        return [parameter.to_local() for parameter in model.parameters()]
    return [parameter.data for chunk in model.chunks for parameter in chunk.parameters()]


@torch.no_grad()
def _refill(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def run(harness: MegatronHarness, name: str, directory: Path, *, few: Collection[str]) -> None:
    """Runs all losses in one layout, or these few, then those that must show the layout's mistake, with it."""
    layout = LAYOUTS[name]
    harness.worker.close()
    harness._settings, harness._data_ranks = {}, {}
    harness.open_role(Role.POLICY, layout.kind, config(layout))
    before = [tensor.detach().clone() for tensor in tensors_of(harness.backend)]

    def update(loss: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        _refill(tensors_of(harness.backend), before)
        settings = config(replace(layout, changes=layout.changes | {"loss": LOSSES[loss]}))
        harness._settings[Role.POLICY] = harness.worker._configs[Role.POLICY] = settings
        return harness.train(batch_of(loss)), harness.weights()

    _write_top_k(harness, directory / f"{name}-top_k")
    _update_all(harness, update, [loss for loss in LOSSES if name in WHOLE or loss in few], directory / name)
    if name in MISTAKES:
        mistake, losses = MISTAKES[name]
        with mistake(harness):
            _update_all(harness, update, losses, directory / f"{name}-mistaken")


def _write_top_k(harness: MegatronHarness, path: Path) -> None:
    """Writes the most probable tokens at all places of all samples, some of which have sampling masks."""
    table = batch_of("sampling_mask")
    counts = [len(row) for row in table["tokens"].to_pylist()]
    rows = zip(harness.top_k(table, "policy", TOP_K), counts, strict=True)
    tokens, logprobs = zip(*(decode_top_k(row, count) for row, count in rows), strict=True)
    if harness.rank == 0:
        tensors = {"tokens": np.concatenate(tokens), "logprobs": np.concatenate(logprobs)}
        write(path.parent, path.name, {key: torch.from_numpy(values) for key, values in tensors.items()}, {})


def _update_all(harness: MegatronHarness, update: Callable[[str], Any], losses: list[str], path: Path) -> None:
    tensors, metrics = {}, {}
    for loss in losses:
        metrics[loss], weights = update(loss)
        tensors |= {f"{loss}/{name}": tensor for name, tensor in weights.items()}
    if harness.rank == 0:
        write(path.parent, path.name, tensors, metrics)


def act(harness: MegatronHarness, directory: Path, names: list[str]) -> None:
    few = LOSSES if LONG & {*names} else FEW
    names_here = (name for name in names if LAYOUTS[name].world == harness.world)
    run_all(harness, directory, names_here, functools.partial(run, few=few))


def main(directory: Path, names: list[str]) -> int:
    """Runs all ranks in the layouts `names`; returns 0 if every one came to its end, else 1."""
    for world in sorted({LAYOUTS[name].world for name in names}):
        if any(run_ranks(world, directory, functools.partial(act, directory=directory, names=names))):
            return 1
    return 0
