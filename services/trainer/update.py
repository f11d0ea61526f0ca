"""One policy update: mini-batches of packs, through any backend and any loss. The same on every rank."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.common.config.trainer import TrainerConfig
from services.common.errors import PreconditionFailed, Reason
from services.trainer.backend import Backend, Role
from services.trainer.losses import LOSSES, Totals
from services.trainer.losses.terms import kl_k3
from services.trainer.optim import learning_rate, weight_decay
from services.trainer.packing import Pack


@dataclass(frozen=True)
class Minibatch:
    """One rank's packs of one optimizer update, and counts over all ranks."""

    packs: Sequence[Pack]
    totals: Totals


def update(
    backend: Backend, minibatches: Sequence[Minibatch], config: TrainerConfig, temperature: float, version: int
) -> dict[str, float]:
    """Applies `minibatches` to the policy of `version`; returns metrics, the same on every rank.

    Raises:
        PreconditionFailed: Engine and trainer disagree about the samples' log-probabilities; nothing is applied.
        FloatingPointError: The gradient is not finite; the weights are spoilt and must not be used.
    """
    if len(minibatches) > 1:  # later mini-batches are compared with the policy before the first
        packs = [pack for minibatch in minibatches for pack in minibatch.packs]
        _set_old_logprobs(packs, backend.forward(Role.POLICY, packs, temperature))
    gap: dict[str, float] = {}
    metrics: list[dict[str, float]] = []
    for index, minibatch in enumerate(minibatches):
        loss = functools.partial(_loss, config=config, totals=minibatch.totals)
        outputs, sums = backend.accumulate(minibatch.packs, temperature, loss)
        if len(minibatches) == 1:  # the policy before the batch is the policy
            _set_old_logprobs(minibatch.packs, outputs)
        gap = gap or _require_agreement(backend, minibatches, config)
        number = version * len(minibatches) + index
        lr = learning_rate(config.optim, number)
        norm = backend.step(lr, weight_decay(config.optim, number))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of mini-batch {index} has norm {norm}; resume from a checkpoint")
        metrics.append({name: float(value) for name, value in sums.items()} | {"grad_norm": norm, "lr": lr})
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]} | gap


def _loss(
    outputs_2N: torch.Tensor, pack: Pack, *, config: TrainerConfig, totals: Totals
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs_N, entropy_N = outputs_2N
    # With one mini-batch the policy before the batch is the policy itself: the ratio is exactly 1.
    columns = {"old_logprobs": logprobs_N.detach(), **pack.columns}
    return LOSSES[config.loss.kind](logprobs_N, entropy_N, columns, totals, config.loss)


def _set_old_logprobs(packs: Sequence[Pack], outputs: Sequence[torch.Tensor]) -> None:
    for pack, outputs_2N in zip(packs, outputs, strict=True):
        pack.columns["old_logprobs"] = outputs_2N[0]


def _require_agreement(backend: Backend, minibatches: Sequence[Minibatch], config: TrainerConfig) -> dict[str, float]:
    """The gap of the whole batch, once every pack has old_logprobs and before anything is applied."""
    gap = _logprob_gap(backend, minibatches)
    if not gap["logprob_gap_mean"] <= config.max_logprob_gap:  # also if it is not a number
        backend.discard_gradients()
        raise PreconditionFailed(
            f"engine and trainer disagree: mean |log-probability gap| {gap['logprob_gap_mean']:.4g} is above "
            f"trainer.max_logprob_gap {config.max_logprob_gap:g}; nothing was applied",
            reason=Reason.LOGPROB_GAP,
            **gap,
        )
    return gap


def _logprob_gap(backend: Backend, minibatches: Sequence[Minibatch]) -> dict[str, float]:
    """|behaviour - trainer| log-probability and its k3 KL, over the batch's tokens on all ranks."""
    packs = [pack for minibatch in minibatches for pack in minibatch.packs]
    num_tokens = sum(minibatch.totals.num_tokens for minibatch in minibatches)
    behaviour_N = torch.cat([pack.columns["behaviour_logprobs"] for pack in packs])
    trainer_N = torch.cat([pack.columns["old_logprobs"] for pack in packs])
    gap_N, kl_N = (behaviour_N - trainer_N).abs(), kl_k3(behaviour_N, trainer_N)
    sums = backend.reduce(torch.stack([gap_N.sum(), kl_N.sum()]), dist.ReduceOp.SUM) / num_tokens
    largest = backend.reduce(gap_N.max(), dist.ReduceOp.MAX)
    return {
        "logprob_gap_mean": float(sums[0]),
        "logprob_gap_max": float(largest),
        "logprob_gap_kl": float(sums[1]),
    }
