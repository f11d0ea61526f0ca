"""Updates the policy mini-batch by mini-batch, with any backend and any loss. Every rank runs the same code."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.common.config.loss import LossConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.trainer.backend import Backend
from services.trainer.losses import Totals, policy_loss
from services.trainer.losses.kinds import covariance, covariance_sums
from services.trainer.updates.gap import Gaps, Replayed, require_agreement
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
            Or the gradient of the first update is not finite and `optim.on_nonfinite` is fail.
        RuntimeError: A later update failed, so that a part of the batch is applied.
    """
    gap: dict[str, float] = {}
    compared, later_outputs = minibatches[:1], []
    if config.loss.old_logprobs == "recompute" and config.loss.is_sampled:
        # The old policy is the one before the first update. The first mini-batch gets it from its own forward.
        compared, later = minibatches, [pack for minibatch in minibatches[1:] for pack in minibatch.packs]
        later_outputs = backend.forward(later, temperature) if later else []
        set_old(later, later_outputs)
    metrics: list[dict[str, float]] = []
    replayed = Replayed()
    num_updates = config.num_epochs * len(minibatches)
    for index, minibatch in enumerate(minibatches * config.num_epochs):
        if config.loss.needs_covariance:
            _set_covariance(backend, minibatch)
        loss = functools.partial(pack_loss, config=config.loss, totals=minibatch.totals)
        outputs, sums = backend.accumulate(minibatch.packs, temperature, loss)
        with later_update(index):
            replayed.add(backend, minibatch.packs)
        if config.loss.is_sampled and index == 0:
            gaps = Gaps()
            packs = [pack for minibatch in compared for pack in minibatch.packs]
            gaps.add(packs, [*outputs, *later_outputs])
            gap = require_agreement(backend, gaps, sum(m.totals.num_tokens for m in compared), config)
            if config.loss.old_logprobs == "recompute":
                set_old(minibatch.packs, outputs)  # for the epochs after the first
        with later_update(index):
            applied = apply_gradient(backend, config, version * num_updates + index)
        metrics.append({name: float(value) for name, value in sums.items()} | applied)
    return means_of(metrics) | gap | replayed.metrics()


def means_of(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the applied updates of a batch, and the number of others as `skipped`.

    If none was applied, the means are over all of them, with 0 in place of numbers that are not finite.
    """
    applied = [update for update in metrics if not update["skipped"]]
    used = applied or [{name: x if math.isfinite(x) else 0.0 for name, x in update.items()} for update in metrics]
    means = {name: sum(update[name] for update in used) / len(used) for name in used[0]}
    return means | {"skipped": float(len(metrics) - len(applied))}


@contextmanager
def later_update(index: int) -> Iterator[None]:
    """Converts an error to one that ends the trainer, unless update `index` of the batch, counted from 0, is the first.

    After an error that a rank survives, the trainer would hold neither the weights before the batch nor those after it.

    Raises:
        RuntimeError: In place of a LockstepError.
    """
    try:
        yield
    except LockstepError as error:
        if not index:
            raise
        raise RuntimeError(
            f"update {index + 1} of a batch failed when those before it were applied; resume from a checkpoint: "
            f"{error.message}"
        ) from error


def set_old(packs: Sequence[Pack], outputs: Sequence[torch.Tensor]) -> None:
    """Makes the log-probabilities in `outputs` those of the old policy."""
    for pack, outputs_2N in zip(packs, outputs, strict=True):
        pack.columns["old_logprobs"] = outputs_2N[0].detach()


def apply_gradient(backend: Backend, config: TrainerConfig, number: int) -> dict[str, float]:
    """Applies the accumulated gradient as update `number`, counted over the run.

    Returns its norm and learning rate, and whether it was skipped because it is not finite.

    Raises:
        PreconditionFailed: NONFINITE_GRADIENT, it is not finite and `optim.on_nonfinite` is fail. It was not applied.
    """
    lr = learning_rate(config.optim, number)
    norm = backend.step(lr, weight_decay(config.optim, number))
    if not math.isfinite(norm) and config.optim.on_nonfinite == "fail":
        raise PreconditionFailed(
            f"the gradient of update {number} has norm {norm} and was not applied; look at the samples of this step, "
            "lower optim.lr, or set optim.on_nonfinite to skip",
            reason=Reason.NONFINITE_GRADIENT,
        )
    return {"grad_norm": norm, "lr": lr, "skipped": float(not math.isfinite(norm))}


def pack_loss(
    outputs_2N: torch.Tensor, pack: Pack, *, config: LossConfig, totals: Totals
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the policy's loss on one pack and its metrics (`policy_loss`)."""
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
