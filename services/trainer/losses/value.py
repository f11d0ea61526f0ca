"""Computes the critic's loss: PPO's squared error (arXiv 1707.06347), clipped as in PPO's first implementation."""

from collections.abc import Mapping

import torch

from services.common.config.loss import ValueLossConfig
from services.trainer.losses.terms import Totals, token_weights


def value_loss(
    values_N: torch.Tensor, columns: dict[str, torch.Tensor], totals: Totals, config: ValueLossConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the loss (V - R)^2 / 2 of N tokens and its metrics, sums to be added over micro-batches and ranks.

    If `value_clip` is c, the loss is the larger of (V - R)^2 / 2 and the same with V clipped to within c of the value
    before the batch. A value that has moved by c toward its return, or past it, gets no gradient to move farther.

    Args:
        values_N: The critic's values V, with gradient.
        columns: Columns of updates.packing.Pack: loss_mask, completion_length, returns and, with a clip, values.
        totals: The counts over the whole mini-batch.
        config: The clip and the aggregation.
    """
    returns_N, clip = columns["returns"], config.value_clip
    losses_N = (values_N - returns_N).square() / 2
    clipped_N = torch.zeros_like(losses_N, dtype=torch.bool)
    if clip is not None:
        near_N = columns["values"] + (values_N - columns["values"]).clamp(-clip, clip)
        near_losses_N = (near_N - returns_N).square() / 2
        clipped_N = ((values_N - columns["values"]).abs() > clip) & (near_losses_N > losses_N)
        losses_N = torch.maximum(losses_N, near_losses_N)
    loss = (token_weights(config, columns, totals) * losses_N).sum()
    # Float64, because the variances are small differences of these means.
    held_N, target_N = values_N.detach().double(), returns_N.double()
    means = {
        "clip_fraction": clipped_N,
        "value_mean": held_N,
        "return_mean": target_N,
        "return_square_mean": target_N.square(),
        "error_mean": target_N - held_N,
        "error_square_mean": (target_N - held_N).square(),
    }
    metrics = {name: (columns["loss_mask"] * mean_N).sum() / totals.num_tokens for name, mean_N in means.items()}
    return loss, {"loss": loss.detach(), **metrics}


def explained_variance(metrics: Mapping[str, float]) -> float:
    """Returns 1 - Var(returns - values) / Var(returns), given `value_loss`'s metrics summed over the mini-batch.

    A perfect critic has 1, one that always predicts the mean return has 0, and a worse one is negative. If the returns
    do not vary, the result is 0.
    """
    variance = metrics["return_square_mean"] - metrics["return_mean"] ** 2
    residual = metrics["error_square_mean"] - metrics["error_mean"] ** 2
    return 1 - residual / variance if variance > 0 else 0.0
