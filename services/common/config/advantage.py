"""Defines the config sections `selection`, the prompts that a step tries and the groups that it trains on, and
`advantage`, how the coordinator turns rewards into advantages.
"""

import math
from typing import Literal

from pydantic import Field

from services.common.config.base import Strict, Table, require_read, require_switch
from services.common.import_path import IMPORT_PATH


class DynamicSamplingConfig(Strict):
    """Replaces groups whose advantages are all zero: dynamic sampling (DAPO, arXiv 2503.14476, eq. 11)."""

    enabled: bool = False
    """Drop groups whose samples all have the same reward, and try further prompts in their place (verl
    filter_groups)."""
    component: str | None = None
    """Component of reward.scorers to compare instead of the reward, such as correctness if there is a length penalty
    too; null compares the reward."""
    max_rounds: float = Field(default=10.0, ge=1)
    """Limit on the prompts that one step tries, as a multiple of data.prompts_per_step."""
    on_budget: Literal["train", "fail"] = "train"
    """What to do if a step reaches max_rounds with too few groups: train on the groups that it has (fails if they are
    too few for the mini-batches and ranks), or fail the run."""

    def check_rules(self) -> None:
        require_switch(self, "dynamic sampling")


class OverSamplingConfig(Strict):
    """Tries more prompts concurrently than a step needs."""

    factor: float = Field(default=1.0, ge=1)
    """Number of prompts to try concurrently, as a multiple of data.prompts_per_step."""
    keep: Literal["index", "arrival"] = "index"
    """Which usable groups to keep. index: the first ones in prompt order, so that the batch does not depend on timing;
    arrival: the first ones to finish, which favors short completions and differs from run to run. All others are
    aborted."""

    def at_once(self, prompts_per_step: int) -> int:
        """Returns the number of prompts that a step starts with."""
        return math.ceil(prompts_per_step * self.factor - 1e-9)  # 10 * 1.1 is a little more than 11


class OverlongConfig(Strict):
    """What to do with samples that reached max_tokens; the scorer `length` is a gentler alternative."""

    mask_truncated: bool = False
    """Leave samples truncated at max_tokens out of the loss (DAPO's overlong filtering). They still count in their
    group's mean and standard deviation."""


class CurriculumConfig(Strict):
    """Orders prompts by their success rate: the share of their samples that passed in earlier steps of this run."""

    enabled: bool = False
    """First try prompts that were never tried or whose success rate (share of samples that passed in earlier steps of
    this run) is from `low` to `high`, then the others."""
    low: float = Field(default=0.1, ge=0, le=1)
    """Lowest success rate of the preferred prompts; below it, a prompt is too hard for now."""
    high: float = Field(default=0.9, ge=0, le=1)
    """Highest success rate of the preferred prompts; above it, a prompt is too easy."""
    component: str | None = None
    """Component of reward.scorers that decides whether a sample passed; null uses the reward."""
    pass_threshold: float = 1.0
    """Minimum reward, or value of `component`, for a sample to pass."""
    window: int | None = Field(default=None, ge=1)
    """Number of most recent steps that success rates are computed over; null is all. Make it longer than an epoch, so
    that prompts outside the range are tried again after a while."""

    def check_rules(self) -> None:
        require_switch(self, "the curriculum")
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} must be at most high {self.high:g}")


class SelectionConfig(Strict):
    """Which prompts a step tries and which groups it trains on; by default, all prompts of the step's batch."""

    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups whose rewards are all equal."""
    over_sampling: OverSamplingConfig = OverSamplingConfig()
    """Number of prompts tried concurrently."""
    overlong: OverlongConfig = OverlongConfig()
    """Treatment of truncated samples."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Order of prompts."""

    def check_rules(self) -> None:
        rounds, factor = self.dynamic.max_rounds, self.over_sampling.factor
        if self.dynamic.enabled and rounds < factor:
            raise ValueError(f"dynamic.max_rounds {rounds:g} must be at least over_sampling.factor {factor:g}")


_GROUP_KINDS = {"grpo", "dr_grpo", "gdpo", "max_rl", "rloo", "opo", "gpg", "per_turn", "reinforce_plus_plus_baseline"}
# What `whiten: auto` means for these kinds, as in their papers.
_BATCH_WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"}
# The kinds that read a key. Keys that are not listed are read by all kinds.
_READ_BY = {
    "normalize_std": {"grpo"},
    "components": {"gdpo"},
    "gamma": {"gae", "reinforce_plus_plus", "per_turn"},
    "lam": {"gae"},
    "bootstrap_truncated": {"gae"},
    "import_path": {"python"},
    "kwargs": {"python"},
}

_WITHOUT_KL = {
    "gdpo": "of which gdpo reads the components",
    "max_rl": "which max_rl divides by the mean of the group, and that is 0 if no sample succeeds",
}


class KlConfig(Strict):
    """A penalty on the reward of each trained token: coef times an estimate of KL(policy || reference)."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the reward; with `target`, its initial value. 0 turns the penalty off and needs
    no reference model."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """KL estimator at each sampled token, with x = log policy - log reference: k1 = x, k2 = x^2 / 2,
    k3 = exp(-x) - 1 + x, abs = |x|."""
    target: float | None = Field(default=None, gt=0)
    """Target KL in nats per sample (summed over its tokens). The coefficient is adapted after each step to reach it;
    null keeps the coefficient constant."""
    horizon: float = Field(default=10000.0, gt=0)
    """Number of samples over which the adaptive coefficient changes by at most 20 % (arXiv 1909.08593, section 2.2)."""

    def check_rules(self) -> None:
        if self.target is not None and not self.coef:
            raise ValueError("kl.target multiplies the coefficient of the previous step: set kl.coef above 0")


class AdvantageConfig(Strict):
    """How the rewards of a batch become the advantage of each token."""

    kind: Literal[
        "grpo",
        "dr_grpo",
        "gdpo",
        "max_rl",
        "rloo",
        "opo",
        "gpg",
        "per_turn",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "gae",
        "distill",
        "python",
    ] = "grpo"
    """Advantage estimator; r is a sample's reward and mean and std are over its prompt group.
    grpo: (r - mean) / (std + eps), arXiv 2402.03300;
    dr_grpo: r - mean, arXiv 2503.20783;
    gdpo: weighted sum of grpo's number for each of `components`, normalized over the batch's samples, arXiv 2601.05242;
    max_rl: (r - mean) / (mean + eps), for rewards that are not negative, arXiv 2602.02710;
    rloo: r - mean of the group's other samples, arXiv 2402.14740;
    opo: r - mean weighted by length in tokens, arXiv 2505.23585;
    gpg: r - mean, scaled up to make up for groups whose rewards are all equal, arXiv 2504.02546;
    per_turn: discounted return of each turn - mean over the same turn of the group's samples, arXiv 2505.11821;
    reinforce_plus_plus: return of each token, whitened, arXiv 2501.03262;
    reinforce_plus_plus_baseline: r - mean, whitened, arXiv 2501.03262;
    remax: return of each token - reward of the greedy completion, arXiv 2310.10505;
    gae: generalized advantage estimation with a critic, arXiv 1506.02438;
    distill: no reward, only what `distill_coef` or trainer.loss.distill adds (on-policy distillation,
    arXiv 2306.13649);
    python: the function of `import_path`.
    """
    normalize_std: bool = True
    """Divide by the standard deviation of the group's rewards. Read by grpo; with false, grpo equals dr_grpo."""
    components: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward component, by the scorer's name; `environment` is the environment's reward. Read by gdpo,
    which compares each component with the group's before adding them, so that none hides another. Scorers whose weight
    in the reward is 0 are refused, because samples that they fail to score are trained on."""
    eps: float = Field(default=1e-6, gt=0)
    """Constant added to every standard deviation, and with max_rl to the mean, before dividing by it."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor: per token for gae and reinforce_plus_plus, per turn for per_turn."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda, read by gae: 0 gives the one-step TD error, 1 gives the return minus the value."""
    bootstrap_truncated: bool = False
    """After the end of a sample that was truncated at max_tokens, bootstrap from the value of its last token instead of
    0. Read by gae."""
    whiten: Literal["auto", "none", "group", "batch"] = "auto"
    """Normalize the advantages to mean 0 and standard deviation 1 over the trained tokens of each group or of the whole
    batch. auto: batch for reinforce_plus_plus, reinforce_plus_plus_baseline and gae, none for all other kinds."""
    import_path: str = Field(default="", pattern=rf"^$|{IMPORT_PATH}")
    """Your estimator, as package.module:function, importable where the coordinator runs. Read by python. It is called
    with the samples (services.coordinator.rl.advantages.samples.Samples), this section and `kwargs`; docs/algorithms.md
    has an example."""
    kwargs: Table = Field(default_factory=dict)
    """Additional keyword arguments for the function of `import_path`."""
    kl: KlConfig = KlConfig()
    """KL penalty in the reward; trainer.loss.kl_coef is the KL penalty in the loss."""
    distill_coef: float | None = Field(default=None, ge=0)
    """Distill from `teacher`: add to the advantage of each token, after whitening, this coefficient times (log teacher
    - log policy) at the token, which descends KL(policy || teacher) token by token. null: 1 with kind distill, 0 with
    all others. 0: the teacher's part is only that of trainer.loss.distill."""

    def check_rules(self) -> None:
        if self.kind == "distill":
            self._require_no_reward()
        if self.kind == "gdpo" and not any(self.components.values()):
            raise ValueError("kind gdpo needs components: a weight other than 0 by the name of a scorer")
        if self.kl.coef and self.kind in _WITHOUT_KL:
            raise ValueError(f"kl.coef is a penalty on the reward, {_WITHOUT_KL[self.kind]}: set trainer.loss.kl_coef")
        if self.kind == "python" and not self.import_path:
            raise ValueError("kind python needs import_path: package.module:function")
        require_read(self, self.kind, _READ_BY)

    def _require_no_reward(self) -> None:
        """Refuses what would change the reward's advantage, which there is none of."""
        if self.kl.coef:
            raise ValueError(
                "kl.coef is a penalty on the reward, which kind distill does not read: set trainer.loss.kl_coef, or "
                "another kind with distill_coef"
            )
        if self.whitening != "none":
            raise ValueError(
                "whiten normalizes the reward's advantage, and kind distill has none: leave it out, or set another "
                "kind with distill_coef"
            )

    @property
    def whitening(self) -> Literal["none", "group", "batch"]:
        """`whiten` with auto resolved."""
        if self.whiten != "auto":
            return self.whiten
        return "batch" if self.kind in _BATCH_WHITENED else "none"

    @property
    def needs_group(self) -> bool:
        """Whether the samples of a prompt are compared with each other, so that there must be at least two."""
        return self.kind in _GROUP_KINDS

    @property
    def needs_values(self) -> bool:
        return self.kind == "gae"

    @property
    def needs_baseline(self) -> bool:
        """Whether each prompt needs a greedy completion, generated and scored, for the column `baseline`."""
        return self.kind == "remax"

    @property
    def needs_reference(self) -> bool:
        """Whether the column `ref_logprobs` must be filled for the KL penalty in the reward."""
        return self.kl.coef > 0

    @property
    def teacher_coef(self) -> float:
        """`distill_coef` with null resolved; 0 without a teacher."""
        return float(self.kind == "distill") if self.distill_coef is None else self.distill_coef

    @property
    def needs_teacher(self) -> bool:
        """Whether the advantages read the column `teacher_logprobs`."""
        return self.teacher_coef > 0
