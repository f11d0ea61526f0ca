"""The policy loss."""

from typing import Literal

from pydantic import Field

from services.common.config.base import Strict


class LossConfig(Strict):
    """Clipped policy gradient (PPO, arXiv 1707.06347) as GRPO uses it (arXiv 2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    """Name of the loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratios below 1 - clip_low get no gradient from negative advantages."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratios above 1 + clip_high get no gradient from positive advantages (clip-higher: arXiv 2503.14476)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL(policy || reference) in the loss; 0 needs no reference model."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """Mean over all tokens; mean over samples of their token means; or token sums over a fixed length (Dr.GRPO)."""
