"""Updates the critic. Works like the policy's update, but reads returns instead of advantages."""

import functools

import torch

from services.common.config.trainer import CriticSettings
from services.trainer.backend import Backend
from services.trainer.losses import Totals, explained_variance, value_loss
from services.trainer.updates.packing import Pack
from services.trainer.updates.policy import Minibatch, apply_gradient, later_update, means_of


def update_critic(
    backend: Backend, minibatches: list[Minibatch], config: CriticSettings, version: int
) -> dict[str, float]:
    """Trains the critic, which is at `version`, `config.num_epochs` times on `minibatches`.

    Returns metrics, the same on every rank.

    Raises:
        PreconditionFailed: The gradient of the first update is not finite and `optim.on_nonfinite` is fail.
        RuntimeError: A later update failed, so that a part of the batch is applied.
    """
    metrics: list[dict[str, float]] = []
    num_updates = config.num_epochs * len(minibatches)
    for index, minibatch in enumerate(minibatches * config.num_epochs):
        loss = functools.partial(_loss, config=config, totals=minibatch.totals)
        _, sums = backend.accumulate(minibatch.packs, 1.0, loss)
        with later_update(index):
            applied = apply_gradient(backend, config, version * num_updates + index)
        means = {name: float(value) for name, value in sums.items()}
        kept = {name: means[name] for name in ("loss", "clip_fraction", "value_mean", "return_mean")}
        metrics.append(kept | {"explained_variance": explained_variance(means)} | applied)
    return {f"critic_{name}": value for name, value in means_of(metrics).items()}


def _loss(
    outputs_1N: torch.Tensor, pack: Pack, *, config: CriticSettings, totals: Totals
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return value_loss(outputs_1N[0], pack.columns, totals, config.value_loss)
