"""Holds prompt groups, sampled and then scored, puts them into a batch, and splits their rewards by a column."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.rollout.v1.rollout_pb2 import Drafts
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp

from services.common.batches.batch import SAMPLE_SCHEMA
from services.coordinator.data.episodes import Episode
from services.coordinator.data.prompts import Prompt, value_name

FINISH_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_TURN_LIMIT: "turn_limit",
}


@dataclass(frozen=True)
class SampledGroup:
    """Holds one prompt, its completions and the stamp of the weights that generated them."""

    index: int
    prompt: Prompt
    completions: Sequence[Completion]
    stamp: PolicyStamp
    drafts: Drafts = field(default_factory=Drafts, kw_only=True)
    """Counts of the tokens that speculative decoding drafted for the completions."""
    num_cached_tokens: int = field(default=0, kw_only=True)
    """Sum over the completions of the prompt tokens that the engine took from its prefix cache."""
    episodes: Sequence[Episode] = field(default=(), kw_only=True)
    """The episode of each completion; empty without an environment."""
    routes: Sequence[bytes] = field(default=(), kw_only=True)
    """The routes of each completion with its prompt (common.batches.routes); empty if the engine returned none."""
    kept: Sequence[bytes] = field(default=(), kw_only=True)
    """The kept sets of each completion (common.batches.kept); empty if nothing was truncated."""

    @property
    def length(self) -> int:
        """Returns the number of tokens of the longest completion."""
        return max(len(completion.tokens) for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Tokens of its samples with their prompts, as micro-batches count them (common.batches.blocks)."""
        return sum(len(self.prompt.tokens) + len(completion.tokens) - 1 for completion in self.completions)

    def episode(self, sample: int) -> Episode | None:
        """Returns the episode of a completion; None without an environment."""
        return self.episodes[sample] if self.episodes else None


@dataclass(frozen=True)
class ScoredGroup(SampledGroup):
    """Holds a sampled group with one score per completion."""

    scores: Sequence[Score]
    scorer: str
    baseline: float | None = None
    """Reward of the prompt's greedy completion, if there is one."""
    columns: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Outputs of other models for the samples: column of the batch -> one list per sample."""

    @property
    def rewards(self) -> np.ndarray:
        """Returns the rewards, float64 [n]."""
        return self.numbers(None)

    @property
    def is_truncated(self) -> np.ndarray:
        """Returns whether each sample was cut off by a limit of tokens, bool [n]."""
        return np.array([c.finish_reason == FinishReason.FINISH_REASON_LENGTH for c in self.completions])

    @property
    def is_failed(self) -> np.ndarray:
        """Returns whether each sample could not be scored, bool [n]; its reward is then 0."""
        return np.array([score.HasField("failure") for score in self.scores])

    def numbers(self, component: str | None) -> np.ndarray:
        """Returns a reward component, or the rewards if `component` is None; float64 [n], 0 for samples without it."""
        if component is None:
            return np.array([score.reward for score in self.scores])
        return np.array([score.components.get(component, 0.0) for score in self.scores])


def to_table(groups: Sequence[ScoredGroup], *, mask_truncated: bool = False) -> pa.Table:
    """Returns the batch without advantages, in the order of `groups`.

    With `mask_truncated`, loss_mask excludes all tokens of samples that reached max_tokens.
    """
    rows = [
        {
            "prompt_id": group.prompt.prompt_id,
            "group": group.index,
            "sample": sample,
            "prompt_tokens": group.prompt.tokens,
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "reward": score.reward,
            "components": list(score.components.items()),
            "baseline": group.baseline,
            "loss_mask": _loss_mask(group, sample, mask_truncated),
            "finish_reason": FINISH_REASONS[completion.finish_reason],
            "policy_version": group.stamp.version,
            "policy_digest": group.stamp.digest,
            "scorer": group.scorer,
            "seed": completion.seed,
            **(vars(group.episodes[sample]) if group.episodes else {}),
            **({"routes": group.routes[sample]} if group.routes else {}),
            **({"kept": group.kept[sample]} if group.kept else {}),
            **{name: rows[sample] for name, rows in group.columns.items()},
        }
        for group in groups
        for sample, (completion, score) in enumerate(zip(group.completions, group.scores, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def _loss_mask(group: ScoredGroup, sample: int, mask_truncated: bool) -> list[bool] | None:
    completion, episode = group.completions[sample], group.episode(sample)
    num_tokens = len(completion.tokens)
    if mask_truncated and completion.finish_reason == FinishReason.FINISH_REASON_LENGTH:
        return [False] * num_tokens
    if episode:
        return episode.loss_mask(num_tokens)
    return [True] * num_tokens if mask_truncated else None


def rewards_by_column(groups: Sequence[ScoredGroup], column: str | None) -> dict[str, float]:
    """Returns the mean reward of the samples of each value, named `reward[<column>=<value>]`; none without a column."""
    if column is None:
        return {}
    rewards: dict[str, list[np.ndarray]] = defaultdict(list)
    name = value_name(column)
    for group in groups:
        rewards[value_name(group.prompt.extra.get(column))].append(group.rewards)
    return {f"reward[{name}={value}]": float(np.concatenate(rewards[value]).mean()) for value in sorted(rewards)}
