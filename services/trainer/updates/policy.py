"""One policy update: mini-batches of packs, through any backend and any loss. The same on every rank."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.common.config.trainer.loss import LossConfig
from services.common.config.trainer.section import TrainerConfig
from services.common.errors import PreconditionFailed, Reason
from services.trainer.backend import Backend
from services.trainer.losses import Totals, policy_loss
from services.trainer.losses.covariance import covariance, covariance_sums
from services.trainer.losses.kl import kl_k3
from services.trainer.updates.optim import learning_rate, weight_decay
from services.trainer.updates.packing import Pack


@dataclass(frozen=True)
class Minibatch:
    """One rank's packs of one optimizer update, and counts over all ranks."""

    packs: Sequence[Pack]
    totals: Totals


def update(
    backend: Backend, minibatches: Sequence[Minibatch], config: TrainerConfig, temperature: float, version: int
) -> dict[str, float]:
    """Applies `minibatches` to the policy of `version`; returns metrics, the same on every rank.

    Engine and trainer are compared on the whole batch if old log-probabilities are recomputed, else on its first
    mini-batch: later ones only meet a policy that has moved.

    Raises:
        PreconditionFailed: Engine and trainer disagree about the samples' log-probabilities; nothing is applied.
        FloatingPointError: The gradient is not finite; the weights are spoilt and must not be used.
    """
    gap: dict[str, float] = {}
    compared, later_outputs = minibatches[:1], []
    if config.loss.old_logprobs == "recompute" and config.loss.is_sampled:
        # Later mini-batches are compared with the policy before the first; the first is with itself.
        compared, later = minibatches, [pack for minibatch in minibatches[1:] for pack in minibatch.packs]
        later_outputs = backend.forward(later, temperature) if later else []
        for pack, outputs_2N in zip(later, later_outputs, strict=True):
            pack.columns["old_logprobs"] = outputs_2N[0]
    metrics: list[dict[str, float]] = []
    for index, minibatch in enumerate(minibatches):
        if config.loss.needs_covariance:
            _set_covariance(backend, minibatch)
        loss = functools.partial(_loss, config=config.loss, totals=minibatch.totals)
        outputs, sums = backend.accumulate(minibatch.packs, temperature, loss)
        if config.loss.is_sampled and index == 0:
            gap = _require_agreement(backend, compared, [*outputs, *later_outputs], config)
        applied = apply_gradient(backend, config, version * len(minibatches) + index)
        metrics.append({name: float(value) for name, value in sums.items()} | applied)
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]} | gap


def apply_gradient(backend: Backend, config: TrainerConfig, number: int) -> dict[str, float]:
    """The optimizer update of that number, counted over the run: its gradient's norm and its learning rate.

    Raises:
        FloatingPointError: The gradient is not finite; the weights are spoilt and must not be used.
    """
    lr = learning_rate(config.optim, number)
    norm = backend.step(lr, weight_decay(config.optim, number))
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient of update {number} has norm {norm}; resume from a checkpoint")
    return {"grad_norm": norm, "lr": lr}


def _loss(
    outputs_2N: torch.Tensor, pack: Pack, *, config: LossConfig, totals: Totals
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    # Unless it was recomputed, the old policy is the engine's or the policy itself: then the ratio is exactly 1.
    is_engine = config.old_logprobs == "engine"
    old_N = pack.columns["behavior_logprobs"] if is_engine else outputs_2N[0].detach()
    columns = {"old_logprobs": old_N, **pack.columns}
    return policy_loss(outputs_2N, columns, pack.completion_lengths, totals, config)


def _set_covariance(backend: Backend, minibatch: Minibatch) -> None:
    columns = [pack.columns for pack in minibatch.packs]
    means_2 = backend.reduce(covariance_sums(columns), dist.ReduceOp.SUM) / minibatch.totals.num_tokens
    for held in columns:
        held["covariance"] = covariance(held, means_2)


def _require_agreement(
    backend: Backend, minibatches: Sequence[Minibatch], outputs: Sequence[torch.Tensor], config: TrainerConfig
) -> dict[str, float]:
    """The gap of engine and trainer over `minibatches`, given the policy's `outputs` before anything is applied."""
    gap = _logprob_gap(backend, minibatches, outputs)
    if not gap["logprob_gap_mean"] <= config.max_logprob_gap:  # also if it is not a number
        backend.discard_gradients()
        raise PreconditionFailed(
            f"engine and trainer disagree: mean |log-probability gap| {gap['logprob_gap_mean']:.4g} is above "
            f"trainer.max_logprob_gap {config.max_logprob_gap:g}; nothing was applied",
            reason=Reason.LOGPROB_GAP,
            **gap,
        )
    return gap


def _logprob_gap(
    backend: Backend, minibatches: Sequence[Minibatch], outputs: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Over the tokens that are trained on, on all ranks: |behavior - trainer| log-probability and its k3 KL.

    And the effective sample size of their importance weights w = exp(trainer - behavior) as a share of them,
    (sum w)^2 / (n sum w^2): 1 is full agreement.
    """
    packs = [pack for minibatch in minibatches for pack in minibatch.packs]
    num_tokens = sum(minibatch.totals.num_tokens for minibatch in minibatches)
    is_trained_N = torch.cat([pack.columns["loss_mask"] for pack in packs]) > 0
    behavior_N = torch.cat([pack.columns["behavior_logprobs"] for pack in packs])[is_trained_N].double()
    trainer_N = torch.cat([outputs_2N[0] for outputs_2N in outputs])[is_trained_N].double()
    gap_N, weight_N = (behavior_N - trainer_N).abs(), (trainer_N - behavior_N).exp()
    sums = torch.stack([x.sum() for x in (gap_N, kl_k3(behavior_N, trainer_N), weight_N, weight_N.square())])
    gap, kl, weight, weight_square = backend.reduce(sums, dist.ReduceOp.SUM) / num_tokens
    largest = torch.cat([gap_N, gap_N.new_zeros(1)]).max()  # a rank's share may be all masked
    return {
        "logprob_gap_mean": float(gap),
        "logprob_gap_max": float(backend.reduce(largest, dist.ReduceOp.MAX)),
        "logprob_gap_kl": float(kl),
        "logprob_gap_ess": float(weight.square() / weight_square),
    }
