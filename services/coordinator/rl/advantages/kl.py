"""Estimates the KL to a reference model at sampled tokens."""

import numpy as np

# The same bounds as in the loss.
_MAX_LOG_RATIO, _MAX_K3 = 20.0, 10.0


def token_kl(logprobs: np.ndarray, ref_logprobs: np.ndarray, kind: str) -> np.ndarray:
    """Estimates KL(policy || reference) in nats from the sampled tokens' log-probabilities.

    k1, k2 and k3 are Schulman's estimators (2020, "Approximating KL divergence"): k1 is unbiased and may be negative,
    k2 is biased and k3 unbiased, both non-negative; abs is |k1|. As in the loss, k3 is at most 10.
    """
    log_ratio = logprobs - ref_logprobs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    if kind == "k3":
        bounded = log_ratio.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return np.minimum(np.expm1(-bounded) + bounded, _MAX_K3)
    return np.abs(log_ratio)
