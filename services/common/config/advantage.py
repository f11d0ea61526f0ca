"""What the coordinator reads to turn rewards into advantages."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.import_path import IMPORT_PATH

_GROUP_KINDS = {"grpo", "dr_grpo", "rloo", "opo", "gpg", "per_turn", "reinforce_plus_plus_baseline"}
_BATCH_WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"}
# Kinds that read a key; the other keys are read by all.
_READ_BY = {
    "normalize_std": {"grpo"},
    "gamma": {"gae", "reinforce_plus_plus", "per_turn"},
    "lam": {"gae"},
    "bootstrap_truncated": {"gae"},
    "import_path": {"python"},
    "kwargs": {"python"},
}


class KlConfig(Strict):
    """Penalty in the reward for every trained token: coef times an estimate of KL(policy || reference)."""

    coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the penalty, in the first step if it is adaptive; 0 needs no reference model."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Of x = log policy - log reference at the sampled token: x, x^2 / 2, exp(-x) - 1 + x, or |x|."""
    target: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Nats per sample (sum over its tokens) that the coefficient is steered towards; null keeps it constant."""
    horizon: float = Field(default=10000.0, gt=0, allow_inf_nan=False)
    """Samples in which the coefficient grows or shrinks by up to a fifth (arXiv 1909.08593, section 2.2)."""

    @model_validator(mode="after")
    def _target_needs_a_start(self) -> Self:
        if self.target is not None and not self.coef:
            raise ValueError("kl.target multiplies the coefficient of the step before: set kl.coef above 0")
        return self


class AdvantageConfig(Strict):
    """From the rewards of a batch to the advantage of each token."""

    kind: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "gpg",
        "per_turn",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "gae",
        "python",
    ] = "grpo"
    """grpo: (r - mean) / (std + eps), arXiv 2402.03300; dr_grpo: r - mean, arXiv 2503.20783; rloo: r - mean of the
    others, arXiv 2402.14740; opo: r - mean weighted by length, arXiv 2505.23585; gpg: r - mean, scaled up for groups
    without a signal, arXiv 2504.02546; per_turn: discounted return of each turn - mean over the group's turns;
    reinforce_plus_plus: return of each token, whitened, and reinforce_plus_plus_baseline: r - mean, whitened, arXiv
    2501.03262; remax: return of each token - reward of the greedy completion, arXiv 2310.10505; gae: arXiv 1506.02438;
    python: your function, see import_path.
    """
    normalize_std: bool = True
    """grpo: divide by the standard deviation of the group's rewards; without it grpo is dr_grpo."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to every standard deviation that is divided by."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token of gae and reinforce_plus_plus, per turn of per_turn."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """gae: 0 is the one-step error of the values, 1 the whole return less the value."""
    bootstrap_truncated: bool = False
    """gae: a sample cut off at max_tokens goes on with the value of its last token, not 0."""
    whiten: Literal["auto", "none", "group", "batch"] = "auto"
    """Shift and scale the advantages to mean 0 and deviation 1 over the trained tokens of each group or of the batch;
    auto: batch for reinforce_plus_plus, reinforce_plus_plus_baseline and gae, none for the others."""
    import_path: str = Field(default="", pattern=rf"^$|{IMPORT_PATH}")
    """Your estimator for kind python: package.module:function, importable where the coordinator runs. It is called with
    the samples (services.coordinator.rl.advantages.samples.Samples), this section and `kwargs`; docs/algorithms.md has
    an example."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for the function of kind python."""
    kl: KlConfig = KlConfig()
    """Penalty for leaving the reference model; trainer.loss.kl_coef is the one in the loss."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> Self:
        if self.kind == "python" and not self.import_path:
            raise ValueError("kind python needs import_path: package.module:function")
        for key, kinds in _READ_BY.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if self.kind not in kinds and getattr(self, key) != default:
                raise ValueError(f"{key} is not read by kind {self.kind}, only by {', '.join(sorted(kinds))}: unset it")
        return self

    @property
    def whitening(self) -> Literal["none", "group", "batch"]:
        """`whiten` with auto resolved."""
        if self.whiten != "auto":
            return self.whiten
        return "batch" if self.kind in _BATCH_WHITENED else "none"

    @property
    def needs_group(self) -> bool:
        """Whether samples of a prompt are compared with each other: at least two are needed."""
        return self.kind in _GROUP_KINDS

    @property
    def needs_values(self) -> bool:
        """Whether a critic must fill the column `values`."""
        return self.kind == "gae"

    @property
    def needs_baseline(self) -> bool:
        """Whether a greedy completion of every prompt must be drawn and scored for the column `baseline`."""
        return self.kind == "remax"

    @property
    def needs_reference(self) -> bool:
        """Whether the column `ref_logprobs` must be filled for the KL penalty in the reward."""
        return self.kl.coef > 0
