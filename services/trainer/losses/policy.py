"""Computes the policy loss: the selected kind's token losses, corrected and averaged, KL penalty and entropy bonus."""

from collections.abc import Callable, Mapping

import torch

from services.common.config.loss import CorrectionConfig, LossConfig, ValueLossConfig
from services.common.errors import InvalidInput
from services.trainer.losses import kinds
from services.trainer.losses.kinds import Tokens, Totals, token_weights

# The bounds of verl. Without them, one token that the policy has made impossible could overflow the whole mean.
_MAX_LOG_RATIO, _MAX_K3 = 20.0, 10.0
# No logit gives less, except that of a token that sampling has removed (updates/softmax.py).
_IMPOSSIBLE = -1e20
# Sums in float64 of equal float32 returns differ from their exact values by less than this share.
_ROUNDING = 1e-12


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns ref / policy - 1 - log(ref / policy).

    It is unbiased, never negative and of low variance. Its mean gradient is that of KL(reference || policy). The
    log-ratio is clamped to -20..20 and the result to at most 10; a clamped token has no gradient.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=_MAX_K3)


# Each takes the log-probabilities of the policy and of the reference.
KL_ESTIMATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": lambda p, q: p - q,  # unbiased as a value; as a loss it is only noise, for its mean gradient is zero
    "k2": lambda p, q: (p - q).square() / 2,  # biased, but its mean gradient is that of KL(policy || reference)
    "k3": kl_k3,
    "abs": lambda p, q: (p - q).abs(),  # a penalty with a bounded gradient; it does not estimate a divergence
}


def correction(tokens: Tokens, config: CorrectionConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the factor [N] of each token's policy loss, without gradient, and metrics [N].

    With the default config the factor is 1 for every token, and there are no metrics.
    """
    log_ratio_N = tokens.columns["old_logprobs"] - tokens.columns["behavior_logprobs"]
    if config == CorrectionConfig():
        return torch.ones_like(log_ratio_N), {}
    is_kept_N = _is_kept(tokens, log_ratio_N, config)
    weights_N = torch.ones_like(log_ratio_N)
    if config.weight != "none":
        weights_N = torch.exp(log_ratio_N if config.weight == "token" else tokens.sequence_sum(log_ratio_N))
    factor_N = weights_N.clamp(max=config.weight_cap) * is_kept_N
    return factor_N, {
        "correction_mean": factor_N,
        "correction_masked": ~is_kept_N,
        "correction_truncated": is_kept_N & (weights_N > config.weight_cap),
    }


def _is_kept(tokens: Tokens, log_ratio_N: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    is_kept_N = torch.ones_like(log_ratio_N, dtype=torch.bool)
    if config.token_mask:
        is_kept_N &= _is_within(log_ratio_N.exp(), config.token_mask)
    if config.geometric_mask:
        is_kept_N &= _is_within(tokens.sequence_mean(log_ratio_N).exp(), config.geometric_mask)
    if config.veto is not None:
        is_kept_N &= tokens.sequence_sum((log_ratio_N.exp() < config.veto).to(log_ratio_N.dtype)) == 0
    return is_kept_N


def _is_within(values_N: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    return (values_N >= bounds[0]) & (values_N <= bounds[1])


# Returns the loss [N] of each token, and metrics [N] to be averaged over tokens. Values of masked tokens are ignored.
TokenLoss = Callable[[Tokens, LossConfig], tuple[torch.Tensor, dict[str, torch.Tensor]]]

LOSSES: dict[str, TokenLoss] = {
    "grpo": kinds.grpo,
    "ppo": kinds.grpo,
    "gspo": kinds.gspo,
    "gmpo": kinds.gmpo,
    "cispo": kinds.cispo,
    "sapo": kinds.sapo,
    "clip_cov": kinds.clip_cov,
    "kl_cov": kinds.kl_cov,
    "dppo": kinds.dppo,
    "reinforce": kinds.reinforce,
    "sft": kinds.sft,
    "python": kinds.python,
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
        columns: The columns of services.trainer.updates.packing.Microbatch, and old_logprobs. loss_mask,
            completion_length and behavior_logprobs are always read; advantages unless kind is sft; ref_logprobs if
            kl_coef is set; covariance for the kinds in services.trainer.losses.kinds.
        lengths: The number of tokens of each sequence in N.
        totals: The counts over the whole mini-batch.
        config: The kind and its coefficients.
    """
    logprobs_N, entropy_N = outputs_2N
    tokens = Tokens.of(logprobs_N, columns, lengths)
    losses_N, means = LOSSES[config.kind](tokens, config)
    is_trained_N = columns["loss_mask"] > 0
    losses_N = losses_N.where(is_trained_N, 0.0)  # a loss of the user may be NaN at others
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
        trained_N = values_N.detach().where(is_trained_N, 0.0)
        metrics[name] = (columns["loss_mask"] * trained_N).sum() / totals.num_tokens
    return loss, metrics


def distill_loss(
    logprobs_KN: torch.Tensor,
    teacher: tuple[torch.Tensor, torch.Tensor],
    columns: dict[str, torch.Tensor],
    totals: Totals,
    config: LossConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of N predicted tokens for their divergence from the teacher, and the divergence's mean in nats.

    Both are sums to be added over micro-batches and ranks. The divergence is between distributions of K + 1 events: the
    teacher's K most probable tokens, and all others together. Merging events makes no divergence larger (data
    processing inequality), so it is a lower bound of that over the whole vocabulary. An event that one of them cannot
    sample at all, such as a token beside those of a sampling mask, does not count.

    Args:
        logprobs_KN: The policy's log-probabilities of the K + 1 events, with gradient.
        teacher: The K tokens, [N, K], negative for padding, and the teacher's log-probabilities, [N, K + 1].
        columns: As in `policy_loss`.
        totals: The counts over the whole mini-batch.
        config: `distill` and `aggregation`.
    """
    tokens_NK, teacher_NK = teacher
    is_event_KN = torch.nn.functional.pad(tokens_NK >= 0, (0, 1), value=True).T
    is_event_KN = is_event_KN & (logprobs_KN > _IMPOSSIBLE) & (teacher_NK.T > _IMPOSSIBLE)
    log_p_KN = torch.where(is_event_KN, logprobs_KN, 0)
    log_q_KN = torch.where(is_event_KN, teacher_NK.T.to(log_p_KN.dtype), 0)
    if config.distill.kl == "forward":
        log_p_KN, log_q_KN = log_q_KN, log_p_KN
    kl_N = (is_event_KN * log_p_KN.exp() * (log_p_KN - log_q_KN)).sum(0)
    loss = config.distill.coef * (token_weights(config, columns, totals) * kl_N).sum()
    return loss, (columns["loss_mask"] * kl_N.detach()).sum() / totals.num_tokens


def _joined(
    own: dict[str, torch.Tensor], of_kind: dict[str, torch.Tensor], config: LossConfig
) -> dict[str, torch.Tensor]:
    """Returns both tables. Raises InvalidInput if a user's loss returns a metric that every update has."""
    taken = {*own, "loss", "policy_loss", "grad_norm", "lr", "skipped", *(["kl"] if config.kl_coef else [])}
    taken |= {"distill_kl"} if config.distill.coef else set()
    if clash := sorted(taken & of_kind.keys()):
        raise InvalidInput(
            f"trainer.loss.import_path: {config.import_path} returned the metric {clash[0]}, which every update has; "
            "give it another name",
            field="trainer.loss.import_path",
        )
    return own | of_kind


def value_loss(
    values_N: torch.Tensor, columns: dict[str, torch.Tensor], totals: Totals, config: ValueLossConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the loss (V - R)^2 / 2 of N tokens and its metrics, sums to be added over micro-batches and ranks.

    If `value_clip` is c, the loss is the larger of (V - R)^2 / 2 and the same with V clipped to within c of the value
    before the batch. A value that has moved by c toward its return, or past it, gets no gradient to move farther.

    Args:
        values_N: The critic's values V, with gradient.
        columns: Columns of updates.packing.Microbatch: loss_mask, completion_length, returns and, with a clip, values.
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
    value_N, target_N = values_N.detach().double(), returns_N.double()
    means = {
        "clip_fraction": clipped_N,
        "value_mean": value_N,
        "return_mean": target_N,
        "return_square_mean": target_N.square(),
        "error_mean": target_N - value_N,
        "error_square_mean": (target_N - value_N).square(),
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
    varies = variance > _ROUNDING * metrics["return_square_mean"]
    return 1 - residual / variance if varies else 0.0
