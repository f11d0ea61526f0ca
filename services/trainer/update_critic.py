"""One update of the critic, like that of the policy but for what it is compared with: returns instead of advantages."""

import functools
import math
from collections.abc import Sequence

import torch

from services.common.config.roles import CriticSettings
from services.trainer.backend import Backend
from services.trainer.losses import Totals, explained_variance, value_loss
from services.trainer.optim import learning_rate, weight_decay
from services.trainer.packing import Pack
from services.trainer.update import Minibatch


def update_critic(
    backend: Backend, minibatches: Sequence[Minibatch], config: CriticSettings, version: int
) -> dict[str, float]:
    """Applies `minibatches` to the critic of `version`; returns metrics, the same on every rank.

    Raises:
        FloatingPointError: The gradient is not finite; the weights are spoilt and must not be used.
    """
    metrics: list[dict[str, float]] = []
    for index, minibatch in enumerate(minibatches):
        loss = functools.partial(_loss, config=config, totals=minibatch.totals)
        _, sums = backend.accumulate(minibatch.packs, 1.0, loss)
        number = version * len(minibatches) + index
        lr = learning_rate(config.optim, number)
        norm = backend.step(lr, weight_decay(config.optim, number))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the critic's gradient of mini-batch {index} has norm {norm}; resume")
        means = {name: float(value) for name, value in sums.items()}
        kept = {name: means[name] for name in ("loss", "clip_fraction", "value_mean", "return_mean")}
        metrics.append(kept | {"explained_variance": explained_variance(means), "grad_norm": norm, "lr": lr})
    return {f"critic_{name}": sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}


def _loss(
    outputs_1N: torch.Tensor, pack: Pack, *, config: CriticSettings, totals: Totals
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return value_loss(outputs_1N[0], pack.columns, totals, config.value_loss)
