"""Updates the policy mini-batch by mini-batch, with any backend and any loss. Every rank runs the same code."""

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
from services.trainer.updates.optim import learning_rate, weight_decay
from services.trainer.updates.packing import Pack


@dataclass(frozen=True)
class Minibatch:
    """Holds one rank's packs for one optimizer update, and the counts over all ranks."""

    packs: Sequence[Pack]
    totals: Totals


def update(
    backend: Backend, minibatches: list[Minibatch], config: TrainerConfig, temperature: float, version: int
) -> dict[str, float]:
    """Trains the policy, which is at `version`, `config.num_epochs` times on `minibatches`.

    Returns metrics, the same on every rank.

    Before the first optimizer update, the engine's log-probabilities are compared with the trainer's: on the whole
    batch if old log-probabilities are recomputed, else on the first mini-batch, because the trainer's
    log-probabilities of later ones come from a policy that has already been updated.

    Raises:
        PreconditionFailed: The engine's and the trainer's log-probabilities differ too much. Nothing is applied.
        FloatingPointError: The gradient is not finite. The weights are corrupt and must not be used.
    """
    gap: dict[str, float] = {}
    compared, later_outputs = minibatches[:1], []
    if config.loss.old_logprobs == "recompute" and config.loss.is_sampled:
        # The old policy is the one before the first update. The first mini-batch gets it from its own forward.
        compared, later = minibatches, [pack for minibatch in minibatches[1:] for pack in minibatch.packs]
        later_outputs = backend.forward(later, temperature) if later else []
        _set_old(later, later_outputs)
    metrics: list[dict[str, float]] = []
    num_updates = config.num_epochs * len(minibatches)
    for index, minibatch in enumerate(minibatches * config.num_epochs):
        if config.loss.needs_covariance:
            _set_covariance(backend, minibatch)
        loss = functools.partial(_loss, config=config.loss, totals=minibatch.totals)
        outputs, sums = backend.accumulate(minibatch.packs, temperature, loss)
        if config.loss.is_sampled and index == 0:
            gap = _require_agreement(backend, compared, [*outputs, *later_outputs], config)
            if config.loss.old_logprobs == "recompute":
                _set_old(minibatch.packs, outputs)  # for the epochs after the first
        applied = apply_gradient(backend, config, version * num_updates + index)
        metrics.append({name: float(value) for name, value in sums.items()} | applied)
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]} | gap


def _set_old(packs: Sequence[Pack], outputs: Sequence[torch.Tensor]) -> None:
    for pack, outputs_2N in zip(packs, outputs, strict=True):
        pack.columns["old_logprobs"] = outputs_2N[0].detach()


def apply_gradient(backend: Backend, config: TrainerConfig, number: int) -> dict[str, float]:
    """Applies the accumulated gradient as update `number`, counted over the run. Returns its norm and learning rate.

    Raises:
        FloatingPointError: The gradient is not finite. The weights are corrupt and must not be used.
    """
    lr = learning_rate(config.optim, number)
    norm = backend.step(lr, weight_decay(config.optim, number))
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient of update {number} has norm {norm}; resume from a checkpoint")
    return {"grad_norm": norm, "lr": lr}


def _loss(
    outputs_2N: torch.Tensor, pack: Pack, *, config: LossConfig, totals: Totals
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    # A recomputed old_logprobs column takes precedence. Otherwise the old policy is the engine's or the policy itself,
    # for which the ratio is exactly 1.
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
    """Returns the gap between engine and trainer on `minibatches`, given the `outputs` of the policy before the update.

    Raises:
        PreconditionFailed: The mean gap is above the config's limit. The gradients are discarded.
    """
    gap = _logprob_gap(backend, minibatches, outputs)
    if not gap["logprob_gap_mean"] <= config.max_logprob_gap:  # "not <=" so that NaN is rejected too
        backend.discard_gradients()
        raise PreconditionFailed(
            f"the engine and the trainer disagree: their log-probabilities differ by {gap['logprob_gap_mean']:.4g} on "
            f"average, more than trainer.max_logprob_gap {config.max_logprob_gap:g}; nothing was applied",
            reason=Reason.LOGPROB_GAP,
            **gap,
        )
    return gap


def _logprob_gap(
    backend: Backend, minibatches: Sequence[Minibatch], outputs: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Compares behavior and trainer log-probabilities on the n trained tokens of all ranks.

    Returns the mean and the maximum of |behavior - trainer|, the k3 estimate of their KL divergence, and the effective
    sample size of the importance weights w = exp(trainer - behavior) as a share of n, (sum w)^2 / (n sum w^2), which is
    1 if they agree exactly.
    """
    packs = [pack for minibatch in minibatches for pack in minibatch.packs]
    num_tokens = sum(minibatch.totals.num_tokens for minibatch in minibatches)
    is_trained_N = torch.cat([pack.columns["loss_mask"] for pack in packs]) > 0
    behavior_N = torch.cat([pack.columns["behavior_logprobs"] for pack in packs])[is_trained_N].double()
    trainer_N = torch.cat([outputs_2N[0] for outputs_2N in outputs])[is_trained_N].double()
    log_weight_N = trainer_N - behavior_N
    weight_N = log_weight_N.exp()
    kl_N = torch.expm1(log_weight_N) - log_weight_N  # unlike the loss's k3 without a bound: it measures
    gap_N = log_weight_N.abs()
    sums = torch.stack([x.sum() for x in (gap_N, kl_N, weight_N, weight_N.square())])
    gap, kl, weight, weight_square = backend.reduce(sums, dist.ReduceOp.SUM) / num_tokens
    largest = torch.cat([gap_N, gap_N.new_zeros(1)]).max()  # all of a rank's tokens may be masked
    return {
        "logprob_gap_mean": float(gap),
        "logprob_gap_max": float(backend.reduce(largest, dist.ReduceOp.MAX)),
        "logprob_gap_kl": float(kl),
        "logprob_gap_ess": float(weight.square() / weight_square),
    }
