"""Estimates KL(policy || reference) from one sampled token (Schulman 2020, "Approximating KL Divergence")."""

import torch

# The bounds of verl. Without them, one token that the policy has made impossible could overflow the whole mean.
_MAX_LOG_RATIO, _MAX_K3 = 20.0, 10.0


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the log-ratio. As a value it is unbiased; as a loss it is only noise, for its mean gradient is zero."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns half the squared log-ratio. It is biased, but its mean gradient is that of KL(policy || reference)."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns ref / policy - 1 - log(ref / policy).

    It is unbiased, never negative and of low variance. Its mean gradient is that of KL(reference || policy). The
    log-ratio is clamped to -20..20 and the result to at most 10; a clamped token has no gradient.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=_MAX_K3)


def kl_abs(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the absolute log-ratio, a penalty with a bounded gradient. It does not estimate a divergence."""
    return (logprobs - ref_logprobs).abs()


KL_ESTIMATES = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "abs": kl_abs}
