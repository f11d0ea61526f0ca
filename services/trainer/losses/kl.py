"""Estimates of KL(policy || reference) from one sampled token (Schulman 2020, "Approximating KL Divergence")."""

import torch


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Log-ratio: unbiased as a value, but its gradient is zero on average, so as a loss it is noise."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: biased as a value, but its mean gradient is that of KL(policy || reference)."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Unbiased, never negative, of low variance; its mean gradient is that of KL(reference || policy)."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def kl_abs(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Absolute log-ratio: no estimate of a divergence, a penalty with a bounded gradient."""
    return (logprobs - ref_logprobs).abs()


KL_ESTIMATES = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "abs": kl_abs}
