"""Defines the config of the policy's and the critic's losses, and of the lag."""

from typing import Literal

from pydantic import Field

from services.common.config.base import Strict, Table, is_set, require_read
from services.common.import_path import IMPORT_PATH

LossKind = Literal[
    "grpo", "ppo", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo", "reinforce", "sft", "python"
]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


class MeanConfig(Strict):
    """How the losses of all tokens are aggregated to one number."""

    aggregation: Aggregation = "token_mean"
    """How token losses are aggregated over a mini-batch. token_mean: mean over all tokens; seq_mean_token_mean: mean
    over samples of each sample's token mean (papers of GRPO, GSPO, GMPO and SAPO); seq_mean_token_sum: mean over
    samples of each sample's token sum; seq_mean_token_sum_norm: the same divided by norm_tokens (Dr.GRPO)."""
    norm_tokens: int | None = Field(default=None, ge=1)
    """Constant that seq_mean_token_sum_norm divides by: set it to the longest possible completion in tokens,
    rollout.sampling.max_tokens. Required by seq_mean_token_sum_norm, not allowed otherwise."""

    def check_rules(self) -> None:
        is_read = self.aggregation == "seq_mean_token_sum_norm"
        if is_read and self.norm_tokens is None:
            raise ValueError(
                "aggregation seq_mean_token_sum_norm needs norm_tokens: set it to the value of "
                "rollout.sampling.max_tokens"
            )
        if not is_read and self.norm_tokens is not None:
            raise ValueError(f"norm_tokens is not read by aggregation {self.aggregation}: leave it out")


class GspoConfig(Strict):
    """The clip range of kind gspo. Its ratio is a geometric mean over the sequence, so the range is narrow."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Lower clip: a sequence with a negative advantage gets no gradient if its ratio (the geometric mean of its tokens'
    ratios) is below 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Upper clip: a sequence with a positive advantage gets no gradient if its ratio is above 1 + clip_high."""


class GmpoConfig(Strict):
    """The clip range of kind gmpo, of the logarithm of a token's ratio: 0.4 clips the ratio at e^-0.4 and e^0.4."""

    clip_low: float = Field(default=0.4, gt=0, le=20)
    """Lower clip: a token with a negative advantage gets no gradient if its log-ratio is below -clip_low."""
    clip_high: float = Field(default=0.4, gt=0, le=20)
    """Upper clip: a token with a positive advantage gets no gradient if its log-ratio is above clip_high."""


class CispoConfig(Strict):
    """The bounds of the importance weight of kind cispo."""

    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Lower bound of the importance weight, 1 - epsilon_low in the paper; 0 is no bound, as in the paper."""
    max_ratio: float = Field(default=5.0, ge=1)
    """Upper bound of the importance weight, 1 + epsilon_high in the paper (4 to 8 work: arXiv 2510.13786)."""


class SapoConfig(Strict):
    """The temperatures of the gate of kind sapo."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate for tokens with a positive advantage. The higher it is, the faster a token's gradient
    fades as its ratio moves away from 1."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature of the gate for all other tokens."""


class ClipCovConfig(Strict):
    """Which tokens kind clip_cov drops. All others are clipped by clip_low and clip_high as in kind grpo."""

    min_covariance: float = Field(default=5.0, ge=0)
    """Tokens whose covariance (log-probability - mean) * (advantage - mean), with means over the mini-batch, is at
    least this get no gradient. The paper instead draws 0.02 % of all tokens at random, from those with a covariance of
    1 to 5. The default is meant for advantages with standard deviation 1."""


class KlCovConfig(Strict):
    """Which tokens kind kl_cov penalizes for moving away from the policy before the batch, and how strongly."""

    min_covariance: float = Field(default=2.0, ge=0)
    """Tokens whose covariance (log-probability - mean) * (advantage - mean), with means over the mini-batch, is at
    least this are penalized: about the 0.2 % of tokens that the paper selects for its 7B models. The default is meant
    for advantages with standard deviation 1."""
    coef: float = Field(default=1.0, gt=0)
    """Coefficient of the penalty |log-probability - old log-probability|."""


class DppoConfig(Strict):
    """The trust region of kind dppo."""

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between the old policy and the policy, over two events (the sampled token, or any other token).
    tv: total variation; kl: KL(old || policy)."""
    threshold: float = Field(default=0.15, gt=0)
    """Tokens get no gradient once they moved in the direction of their advantage and their divergence is above this.
    For kl use a smaller value, about 0.05."""
    max_ratio: float = Field(default=20.0, ge=1)
    """Upper bound of the ratio, which limits the weight of a single token."""


class CorrectionConfig(Strict):
    """Corrects for differences between the log-probabilities of engine and trainer.

    The ratio is exp(old log-probability - behavior log-probability), without gradient. Weights and masks apply to the
    policy term of the loss only, not to the KL and entropy terms. The counts that the loss is divided by stay those of
    the whole batch, so dropping a token or sequence does not increase the weight of the others.
    """

    weight: Literal["none", "token", "sequence"] = "none"
    """Truncated importance sampling (TIS) between engine and trainer: multiply the loss of each token by
    exp(old - behavior log-probability). token: the token's own ratio; sequence: the product over its sequence."""
    weight_cap: float = Field(default=2.0, ge=1)
    """Upper bound of the importance weight."""
    token_mask: tuple[float, float] | None = None
    """Drop tokens whose ratio, as in `weight`, is outside [low, high]. For IcePop, set [0.5, 5] with weight: token and
    weight_cap: 5."""
    geometric_mask: tuple[float, float] | None = None
    """Drop sequences whose geometric mean of token ratios is outside [low, high], such as [0.99, 1.01]. The mean over
    many tokens is close to 1, so long sequences need narrow bounds."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Drop every sequence that has a token with a ratio below this, such as 1e-4."""

    def check_rules(self) -> None:
        for name in ("token_mask", "geometric_mask"):
            bounds = getattr(self, name)
            if bounds and not 0 <= bounds[0] <= 1 <= bounds[1]:
                raise ValueError(f"{name} {list(bounds)} must be [low, high] with 0 <= low <= 1 <= high")
        if self.weight == "none" and is_set(self, "weight_cap"):
            raise ValueError("weight_cap has no effect while weight is none: set weight to token or sequence")


# The most bytes of a sample's top k: they travel with its other columns in one message, of 256 MiB at most.
_MAX_TOP_K_BYTES = 128 << 20


class DistillConfig(Strict):
    """A divergence from the teacher in the loss, over the tokens that the teacher finds most probable.

    At each token of a sample, the k most probable tokens of the teacher are compared one by one, and all others as one.
    The divergence is therefore at most that over the whole vocabulary, and 0 only if the k probabilities are equal.
    """

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the divergence; 0 turns it off. Needs `teacher`. With advantage.kind distill, also set
    advantage.distill_coef: 0 for this divergence alone."""
    top_k: int = Field(default=64, ge=1, le=4096)
    """Number k of tokens. A batch has 8 k + 4 bytes for each token of its samples."""
    kl: Literal["reverse", "forward"] = "reverse"
    """reverse: KL(policy || teacher), which makes the policy avoid what the teacher would not say; forward:
    KL(teacher || policy), which makes it able to say all that the teacher would."""

    def check_rules(self) -> None:
        for name in ("top_k", "kl"):
            if not self.coef and is_set(self, name):
                raise ValueError(f"distill.{name} has no effect while distill.coef is 0: set distill.coef")

    @property
    def used_top_k(self) -> int:
        """`top_k`, or 0 if the divergence is off."""
        return self.top_k if self.coef else 0


# The kinds of loss that limit the ratio to the old policy; grpo and ppo with a negative advantage only by clip_dual.
_TRUST_REGIONS = {"grpo", "ppo", "gspo", "gmpo", "cispo", "sapo", "dppo"}

# The kinds that read a key. Keys that are not listed are read by all kinds.
_READ_BY = {
    "clip_low": ("grpo", "ppo", "clip_cov"),
    "clip_high": ("grpo", "ppo", "clip_cov"),
    "clip_dual": ("grpo", "ppo"),
    "gspo": ("gspo",),
    "gmpo": ("gmpo",),
    "cispo": ("cispo",),
    "sapo": ("sapo",),
    "clip_cov": ("clip_cov",),
    "kl_cov": ("kl_cov",),
    "dppo": ("dppo",),
    "import_path": ("python",),
    "kwargs": ("python",),
}


class LossConfig(MeanConfig):
    """The policy loss: the loss of its kind, importance weights, a KL penalty and an entropy bonus."""

    kind: LossKind = "grpo"
    """Policy loss. grpo and ppo are the same clipped surrogate; docs/algorithms.md has the formula of each kind.
    "Ratio" below means exp(log-probability - old log-probability) of a token; see old_logprobs."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip: a token with a negative advantage gets no gradient if its ratio is below 1 - clip_low; 1 is no bound.
    Read by kinds grpo, ppo and clip_cov (verl clip_ratio_low)."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip: a token with a positive advantage gets no gradient if its ratio is above 1 + clip_high (clip-higher:
    arXiv 2503.14476). It acts only if ratios differ from 1: with several num_minibatches or num_epochs, or with
    old_logprobs engine. Read by kinds grpo, ppo and clip_cov (verl clip_ratio_high)."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Dual clip (arXiv 1912.09729, which uses 3): a token with a negative advantage gets no gradient if its ratio is
    above this; null is no bound. Read by kinds grpo and ppo (verl clip_ratio_c)."""
    gspo: GspoConfig = GspoConfig()
    """Used by kind gspo."""
    gmpo: GmpoConfig = GmpoConfig()
    """Used by kind gmpo."""
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
    import_path: str = Field(default="", pattern=rf"^$|{IMPORT_PATH}")
    """Your loss, as package.module:function, importable on every trainer rank. Read by python. It is called with the
    tokens (services.trainer.losses.kinds.Tokens), this section and `kwargs`; docs/algorithms.md has an example."""
    kwargs: Table = Field(default_factory=dict)
    """Additional keyword arguments for the function of `import_path`."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty against the reference model in the loss; 0 turns it off and needs no reference
    model."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """KL estimator, with d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|.
    On samples of the policy, the expected gradient of k2 is that of KL(policy || reference) and that of k3 is that of
    KL(reference || policy). The gradient of k1 is only noise, and that of abs depends only on the sign of d."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus; 0 turns it off."""
    old_logprobs: Literal["recompute", "engine", "on_policy"] = "recompute"
    """Log-probabilities in the denominator of the ratio. recompute: those of the trainer's policy before the batch,
    which costs a forward pass if num_minibatches is above 1; engine: those that the engine sampled with; on_policy:
    those of the current policy, so that every ratio is 1 in every mini-batch."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights and masks that correct for differences between engine and trainer."""
    distill: DistillConfig = DistillConfig()
    """Divergence from the teacher."""

    def check_rules(self) -> None:
        super().check_rules()
        if self.kind == "python" and not self.import_path:
            raise ValueError("kind python needs import_path: package.module:function")
        require_read(self, self.kind, _READ_BY)
        if self.distill.coef and not self.is_sampled:
            raise ValueError(f"kind {self.kind} trains on tokens that the policy has not sampled: leave distill out")
        if self.correction == CorrectionConfig():
            return
        if self.old_logprobs == "engine":
            raise ValueError(
                "with old_logprobs engine the ratio already contains the difference of engine and trainer, which "
                "correction would count twice: leave correction out, or set old_logprobs to recompute"
            )
        if not self.is_sampled:
            raise ValueError(f"kind {self.kind} trains on tokens that no engine sampled: leave correction out")

    @property
    def is_sampled(self) -> bool:
        """Whether an engine sampled the tokens, so that they have advantages and behavior log-probabilities."""
        return self.kind != "sft"

    @property
    def corrects_engine(self) -> bool:
        """Whether the loss of every token accounts for the difference between engine and trainer: by an importance
        weight, by a mask (IcePop), or because the limited ratio is the one to the engine's log-probabilities."""
        is_corrected = self.correction.weight != "none" or self.correction.token_mask is not None
        return is_corrected or (self.old_logprobs == "engine" and self.kind in _TRUST_REGIONS)

    @property
    def needs_covariance(self) -> bool:
        """Whether the loss selects tokens by the covariance of their log-probabilities and advantages."""
        return self.kind in ("clip_cov", "kl_cov")


class ValueLossConfig(MeanConfig):
    """The squared error of a critic's values (PPO, arXiv 1707.06347)."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Value clip: a value gets no gradient once it has moved by more than this toward its return (verl
    cliprange_value); null turns clipping off."""


class LagConfig(Strict):
    """Training on samples of earlier weights, so that generating and training overlap completely."""

    versions: int = Field(default=0, ge=0, le=8)
    """Number k of versions by which samples lag: the batch that updates version t is drawn from exactly version t - k,
    while the trainer is still busy with the batches before it. The first k batches of a run are drawn from its first
    weights. 0 is exactly on-policy. A lag needs a loss with a bounded ratio (kind grpo, ppo, gspo, gmpo, cispo, sapo or
    dppo) and old log-probabilities that are the engine's (trainer.loss.old_logprobs engine) or corrected
    (recompute with several mini-batches and trainer.loss.correction.weight)."""
    min_ess: float = Field(default=0.5, gt=0, le=1)
    """Fail the step, before any update is applied, if the effective sample size of a batch's importance weights, as a
    share of its tokens, is below this. The weights are exp(trainer - engine log-probability); the share is 1 if both
    agree exactly. With old_logprobs engine it is that of the first mini-batch, because the others come after an update.
    Read only with a lag."""

    def check_rules(self) -> None:
        if not self.versions and is_set(self, "min_ess"):
            raise ValueError("lag.min_ess has no effect while lag.versions is 0: set lag.versions, or leave it out")


def check_top_k(top_k: int, most_tokens: int, key: str) -> None:
    """Raises ValueError if the teacher's tokens of a sample of `most_tokens`, which `key` sets, exceed a message."""
    most_k, limit = (_MAX_TOP_K_BYTES // most_tokens - 4) // 8, _MAX_TOP_K_BYTES >> 20
    if top_k > most_k:
        raise ValueError(
            f"trainer.loss.distill.top_k {top_k} makes {(8 * top_k + 4) * most_tokens / (1 << 20):.1f} MiB of a "
            f"sample of {most_tokens} tokens, and at most {limit} can be sent: set it to at most {most_k}, or lower "
            f"{key}"
        )


def check_lag(lag: LagConfig, loss: LossConfig, num_minibatches: int) -> None:
    """Raises ValueError if samples of earlier weights would be trained on as if they were the policy's own."""
    if not lag.versions:
        return
    if loss.kind not in _TRUST_REGIONS:
        kinds = ", ".join(sorted(_TRUST_REGIONS))
        raise ValueError(
            f"lag.versions {lag.versions} needs a loss that limits the ratio to the weights that were sampled: set "
            f"loss.kind to one of {kinds}, not {loss.kind}, or lag.versions to 0"
        )
    is_corrected = loss.old_logprobs == "recompute" and num_minibatches > 1 and loss.correction.weight != "none"
    if loss.old_logprobs != "engine" and not is_corrected:
        raise ValueError(
            f"lag.versions {lag.versions} with loss.old_logprobs {loss.old_logprobs} would treat the samples as the "
            "policy's own: set loss.old_logprobs to engine, or to recompute with num_minibatches above 1 and "
            "loss.correction.weight token or sequence"
        )
