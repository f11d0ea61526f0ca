"""Computes the policy loss: the selected kind's token losses, corrected and averaged, KL penalty and entropy bonus."""

from collections.abc import Callable

import torch

from services.common.config.trainer.loss import LossConfig
from services.common.errors import InvalidInput
from services.trainer.losses.cispo import cispo
from services.trainer.losses.correction import correction
from services.trainer.losses.covariance import clip_cov, kl_cov
from services.trainer.losses.dppo import dppo
from services.trainer.losses.grpo import grpo
from services.trainer.losses.gspo import gspo
from services.trainer.losses.kl import KL_ESTIMATES
from services.trainer.losses.python import python
from services.trainer.losses.reinforce import reinforce
from services.trainer.losses.sapo import sapo
from services.trainer.losses.sft import sft
from services.trainer.losses.terms import Tokens, Totals, token_weights

# Returns the loss [N] of each token, and metrics [N] to be averaged over tokens. Values of masked tokens are ignored.
TokenLoss = Callable[[Tokens, LossConfig], tuple[torch.Tensor, dict[str, torch.Tensor]]]

LOSSES: dict[str, TokenLoss] = {
    "grpo": grpo,
    "ppo": grpo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo": dppo,
    "reinforce": reinforce,
    "sft": sft,
    "python": python,
}


def policy_loss(
    outputs_2N: torch.Tensor,
    columns: dict[str, torch.Tensor],
    lengths: tuple[int, ...],
    totals: Totals,
    config: LossConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the loss of N predicted tokens and its metrics. Both are sums to be added over micro-batches and ranks.

    Args:
        outputs_2N: Each token's log-probability under the policy and the policy's entropy there, in nats, with
            gradient.
        columns: The columns of services.trainer.updates.packing.Pack, and old_logprobs. loss_mask, completion_length
            and behavior_logprobs are always read; advantages unless kind is sft; ref_logprobs if kl_coef is set;
            covariance for the kinds in services.trainer.losses.covariance.
        lengths: The number of tokens of each sequence in N.
        totals: The counts over the whole mini-batch.
        config: The kind and its coefficients.
    """
    logprobs_N, entropy_N = outputs_2N
    tokens = Tokens.of(logprobs_N, columns, lengths)
    losses_N, means = LOSSES[config.kind](tokens, config)
    factor_N, corrected = correction(tokens, config.correction)
    weights_N = token_weights(config, columns, totals)
    policy_loss = (weights_N * factor_N * losses_N).sum()
    loss = policy_loss - config.entropy_coef * (weights_N * entropy_N).sum()
    means = _joined({"entropy": entropy_N, "ratio_mean": tokens.log_ratio_N.exp(), **corrected}, means, config)
    if config.kl_coef:
        kl_N = KL_ESTIMATES[config.kl_kind](logprobs_N, tokens.columns["ref_logprobs"])
        loss = loss + config.kl_coef * (weights_N * kl_N).sum()
        means["kl"] = kl_N
    metrics = {"loss": loss.detach(), "policy_loss": policy_loss.detach()}
    for name, values_N in means.items():
        metrics[name] = (columns["loss_mask"] * values_N.detach()).sum() / totals.num_tokens
    return loss, metrics


def _joined(
    own: dict[str, torch.Tensor], of_kind: dict[str, torch.Tensor], config: LossConfig
) -> dict[str, torch.Tensor]:
    """Returns both tables. Raises InvalidInput if a user's loss returns a metric that every update has."""
    taken = {*own, "loss", "policy_loss", "grad_norm", "lr", *(["kl"] if config.kl_coef else [])}
    if clash := sorted(taken & of_kind.keys()):
        raise InvalidInput(
            f"trainer.loss.import_path: {config.import_path} returned the metric {clash[0]}, which every update has; "
            "give it another name",
            field="trainer.loss.import_path",
        )
    return own | of_kind
