"""What the coordinator reads to turn rewards into advantages."""

from typing import Literal

from pydantic import Field

from services.common.config.base import Strict


class AdvantageConfig(Strict):
    """From the rewards of a prompt group to the advantage of each sample."""

    kind: Literal["grpo", "dr_grpo"] = "grpo"
    """grpo: (r - mean) / (std + eps), arXiv 2402.03300; dr_grpo: r - mean, arXiv 2503.20783."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation of grpo."""
