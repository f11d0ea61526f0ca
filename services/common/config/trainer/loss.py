"""The losses of policy and critic."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict

LossKind = Literal["grpo", "ppo", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo", "reinforce", "sft"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


class MeanConfig(Strict):
    """How the losses of tokens become one number."""

    aggregation: Aggregation = "token_mean"
    """Mean over all tokens; mean over samples of their token means (the GRPO, GSPO and SAPO papers), of their token
    sums, or of their token sums over norm_tokens (Dr.GRPO)."""
    norm_tokens: int | None = Field(default=None, ge=1)
    """The constant that seq_mean_token_sum_norm divides by: the longest possible completion,
    rollout.sampling.max_tokens."""

    @model_validator(mode="after")
    def _norm_is_given(self) -> Self:
        is_read = self.aggregation == "seq_mean_token_sum_norm"
        if is_read and self.norm_tokens is None:
            raise ValueError(
                "aggregation seq_mean_token_sum_norm needs norm_tokens: that of rollout.sampling.max_tokens"
            )
        if not is_read and self.norm_tokens is not None:
            raise ValueError(f"norm_tokens is not read by aggregation {self.aggregation}: leave it out")
        return self


class GspoConfig(Strict):
    """Clip range of kind gspo; its ratio is a geometric mean over the sequence, so the range is narrow."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Sequences with a ratio below 1 - clip_low get no gradient from negative advantages."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Sequences with a ratio above 1 + clip_high get no gradient from positive advantages."""


class CispoConfig(Strict):
    """Bounds of the importance weight of kind cispo."""

    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Smaller weights are raised to this, the paper's 1 - epsilon_low; 0 is no bound, as there."""
    max_ratio: float = Field(default=5.0, ge=1)
    """Larger weights are truncated to this, the paper's 1 + epsilon_high (4 to 8 work: arXiv 2510.13786)."""


class SapoConfig(Strict):
    """Temperatures of the gate of kind sapo: the higher, the sooner tokens off the policy fade."""

    tau_positive: float = Field(default=1.0, gt=0)
    """For tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0)
    """For all others."""


class ClipCovConfig(Strict):
    """Which tokens kind clip_cov leaves out; what it keeps is clipped by clip_low and clip_high as in kind grpo."""

    min_covariance: float = Field(default=5.0, ge=0)
    """Tokens with at least this much (log-probability - mean) * (advantage - mean) get no gradient: the tail above the
    range 1 to 5 from which the paper draws 0.02 % of all tokens. Meant for advantages of deviation 1."""


class KlCovConfig(Strict):
    """Which tokens kind kl_cov holds near the policy before the batch, and how firmly."""

    min_covariance: float = Field(default=2.0, ge=0)
    """Tokens with at least this much (log-probability - mean) * (advantage - mean) get the penalty: about the 0.2 % of
    the paper's 7B models. Meant for advantages of deviation 1."""
    coef: float = Field(default=1.0, gt=0)
    """Weight of the penalty |log-probability - old log-probability|."""


class DppoConfig(Strict):
    """The trust region of kind dppo."""

    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL(old || policy) of the distribution over two events: the sampled token, or any other."""
    threshold: float = Field(default=0.15, gt=0)
    """Tokens that moved farther, in the direction of their advantage, get no gradient; kl is smaller, about 0.05."""
    max_ratio: float = Field(default=20.0, ge=1)
    """A larger ratio counts as this much: one token of a bad sample weighs no more."""


class CorrectionConfig(Strict):
    """For engine and trainer that disagree; ratio here is exp(old - behaviour log-probability), without gradient.

    Weights and masks apply to the policy's term of the loss only, not to KL and entropy. Counts that the loss is
    divided by stay those of the batch: what a mask drops is not made up for by the rest.
    """

    weight: Literal["none", "token", "sequence"] = "none"
    """Truncated importance sampling (TIS): multiply by the ratio of the token, or by the product over its sequence."""
    weight_cap: float = Field(default=2.0, ge=1)
    """Larger weights are truncated to this."""
    token_mask: tuple[float, float] | None = None
    """Drop tokens with a ratio outside of [low, high]. IcePop is [0.5, 5] with weight: token and weight_cap: 5."""
    geometric_mask: tuple[float, float] | None = None
    """Drop sequences with a geometric mean of ratios outside of [low, high], such as [0.99, 1.01]: over many tokens the
    mean comes near 1, so long ones need narrow bounds."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Drop sequences with a token whose ratio is below this, such as 1e-4."""

    @model_validator(mode="after")
    def _bounds_are_used(self) -> Self:
        for name in ("token_mask", "geometric_mask"):
            bounds = getattr(self, name)
            if bounds and not 0 <= bounds[0] <= 1 <= bounds[1]:
                raise ValueError(f"{name} {list(bounds)} must be [low, high] with 0 <= low <= 1 <= high")
        if self.weight == "none" and self.weight_cap != type(self).model_fields["weight_cap"].default:
            raise ValueError("weight_cap truncates weights, and weight is none: set weight to token or sequence")
        return self


# The settings that only some kinds read.
_KINDS_OF = {
    "clip_low": ("grpo", "ppo", "clip_cov"),
    "clip_high": ("grpo", "ppo", "clip_cov"),
    "clip_dual": ("grpo", "ppo"),
    "gspo": ("gspo",),
    "cispo": ("cispo",),
    "sapo": ("sapo",),
    "clip_cov": ("clip_cov",),
    "kl_cov": ("kl_cov",),
    "dppo": ("dppo",),
}


class LossConfig(MeanConfig):
    """The policy loss: a kind's loss of every token, weighted, with a KL penalty and an entropy bonus."""

    kind: LossKind = "grpo"
    """Name of the loss; grpo and ppo are the same clipped surrogate."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Ratios below 1 - clip_low get no gradient from negative advantages; 1 is no bound. Kinds grpo, ppo, clip_cov."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratios above 1 + clip_high get no gradient from positive advantages (clip-higher: arXiv 2503.14476)."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Ratios above this get no gradient from negative advantages (dual clip: arXiv 1912.09729), 3 there; null is no
    such bound. Kinds grpo and ppo."""
    gspo: GspoConfig = GspoConfig()
    """Used by kind gspo."""
    cispo: CispoConfig = CispoConfig()
    """Used by kind cispo."""
    sapo: SapoConfig = SapoConfig()
    """Used by kind sapo."""
    clip_cov: ClipCovConfig = ClipCovConfig()
    """Used by kind clip_cov."""
    kl_cov: KlCovConfig = KlCovConfig()
    """Used by kind kl_cov."""
    dppo: DppoConfig = DppoConfig()
    """Used by kind dppo."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the estimate of KL(policy || reference) in the loss; 0 needs no reference model."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """The estimate, with d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|.
    On samples of the policy only k2 has the gradient of KL(policy || reference) on average; k3 has that of
    KL(reference || policy), k1 none but noise, and abs pulls with the sign of d alone."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    old_logprobs: Literal["recompute", "engine", "on_policy"] = "recompute"
    """Denominator of the ratio: the trainer's policy before the batch, at the price of a forward if num_minibatches is
    above 1; the engine's log-probabilities; or the policy itself, so that every ratio is 1 in every mini-batch."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights and masks for engine and trainer that disagree."""

    @model_validator(mode="after")
    def _settings_are_of_the_kind(self) -> Self:
        for name, kinds in _KINDS_OF.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is not read by kind {self.kind}: leave it out, or set kind to {kinds[0]}")
        return self

    @model_validator(mode="after")
    def _correction_has_a_meaning(self) -> Self:
        if self.correction == CorrectionConfig():
            return self
        if self.old_logprobs == "engine":
            raise ValueError(
                "old_logprobs engine has the engine's policy in the ratio, so correction would count it twice: "
                "leave correction out, or set old_logprobs to recompute"
            )
        if not self.is_sampled:
            raise ValueError(f"kind {self.kind} has no policy that its tokens should be of: leave correction out")
        return self

    @property
    def is_sampled(self) -> bool:
        """Whether the tokens are an engine's, so that they have advantages and a policy that they are of."""
        return self.kind != "sft"

    @property
    def needs_covariance(self) -> bool:
        """Whether tokens are told apart by the covariance of their log-probabilities and advantages."""
        return self.kind in ("clip_cov", "kl_cov")


class ValueLossConfig(MeanConfig):
    """Squared error of a critic's values (PPO, arXiv 1707.06347)."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Values that moved farther than this towards their return get no gradient; null for no clip."""
