"""Prompt groups, sampled and then scored: puts them into a batch, and splits their rewards by a column."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.rollout.v1.rollout_pb2 import Drafts
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp

from services.common.batches import SAMPLE_SCHEMA, join_sampling_masks
from services.common.rewards import total
from services.coordinator.data.calls import EPISODE_SCHEMA, Left
from services.coordinator.data.prompts import Prompt, value_name
from services.coordinator.data.reading.record import Record


@dataclass(frozen=True)
class Episode:
    """The tokens of a sample that are the policy's turns. All others are the environment's and are not trained on.

    Turn k has the tokens from `turn_begins[k]` to `turn_ends[k]`, exclusive, and the reward `turn_rewards[k]`, which
    is the environment's times `environment.weight`.
    """

    turn_begins: Sequence[int]
    turn_ends: Sequence[int]
    turn_rewards: Sequence[float]
    environment: str

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Self | None:
        """Returns the episode of a row of a batch; None if the row was sampled without an environment."""
        if row["environment"] is None:
            return None
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})  # type: ignore[arg-type]

    @property
    def reward(self) -> float:
        return total(self.turn_rewards)

    def loss_mask(self, num_tokens: int) -> np.ndarray:
        """Returns whether the policy sampled each of `num_tokens` tokens, bool [num_tokens]."""
        mask = np.zeros(num_tokens, bool)
        for begin, end in zip(self.turn_begins, self.turn_ends, strict=True):
            mask[begin:end] = True
        return mask

    def turns(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [tokens[begin:end] for begin, end in zip(self.turn_begins, self.turn_ends, strict=True)]

    def replies(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """Returns the tokens that the environment added after each turn; none after the last."""
        nexts = [*self.turn_begins[1:], len(tokens)][: len(self.turn_ends)]  # a failed episode has no turn
        return [tokens[end:begin] for end, begin in zip(self.turn_ends, nexts, strict=True)]


@dataclass
class Stream:
    """The tokens of an episode in progress. Tokens are only appended, exactly as they were sampled or sent."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    routed_experts: bytearray = field(default_factory=bytearray)
    sampling_mask: list[tuple[bytes, int]] = field(default_factory=list)
    """The sampling masks and number of tokens of each part of `tokens`, for
    common.batches.join_sampling_masks."""

    @property
    def context(self) -> tuple[int, ...]:
        """Returns the prompt of the next turn: all tokens so far."""
        return (*self.prompt, *self.tokens)

    @property
    def joined_sampling_mask(self) -> bytes:
        """Returns the sampling masks of all tokens in one; empty if nothing was truncated."""
        has_masks = any(mask for mask, _ in self.sampling_mask)
        return join_sampling_masks(self.sampling_mask) if has_masks else b""

    @property
    def num_seen(self) -> int:
        """Returns the number of tokens that the engine has seen, as prompts or by sampling them."""
        return len(self.prompt) + (self.ends[-1] if self.ends else 0)

    def add_turn(self, completion: Completion, routed_experts: bytes = b"", sampling_mask: bytes = b"") -> None:
        """Appends a sampled turn with its sampling masks, and the routed experts of the tokens that have none yet.

        `routed_experts` are those of all tokens up to here but the last. Tokens of earlier turns keep the routed
        experts that they were sampled with.
        """
        self.routed_experts += routed_experts[len(self.routed_experts) :]
        self.begins.append(len(self.tokens))
        self.tokens.extend(completion.tokens)
        self.logprobs.extend(completion.logprobs)
        self.sampling_mask.append((sampling_mask, len(completion.tokens)))
        self.ends.append(len(self.tokens))

    def add_context(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample."""
        self.tokens.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        self.sampling_mask.append((b"", len(tokens)))

    def end(self, reason: FinishReason, seed: int, environment: str) -> tuple[Completion, Episode]:
        completion = Completion(tokens=self.tokens, logprobs=self.logprobs, finish_reason=reason, seed=seed)
        return completion, Episode(self.begins, self.ends, self.rewards, environment)


FINISH_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_TURN_LIMIT: "turn_limit",
}


@dataclass(frozen=True)
class Row:
    """A row of a batch: a sample or, of an agent's episode, a segment."""

    sample: int
    prompt_tokens: Sequence[int]
    completion: Completion
    episode: Episode | None = None
    routed_experts: bytes | None = None
    sampling_mask: bytes | None = None
    segment: int | None = None
    """Number of the segment in its episode; None without an agent."""
    calls: Sequence[Mapping[str, object]] | None = None
    """The call of each turn: its number, that of the call that it continues, and the SHA-256 of its body."""
    num_repeated: int = 0
    """Number of the first turns that are trained in another row of the episode."""

    @property
    def num_tokens(self) -> int:
        """Tokens with the prompt, as micro-batches count them (common.batches)."""
        return len(self.prompt_tokens) + len(self.completion.tokens) - 1

    def loss_mask(self, *, mask_truncated: bool) -> np.ndarray | None:
        """Returns which tokens are trained, bool [N]; None if all are. With `mask_truncated`, none of a truncated
        sample is."""
        num_tokens = len(self.completion.tokens)
        if mask_truncated and self.completion.finish_reason == FinishReason.FINISH_REASON_LENGTH:
            return np.zeros(num_tokens, bool)
        if self.episode is None:
            return np.ones(num_tokens, bool) if mask_truncated else None
        mask = self.episode.loss_mask(num_tokens)
        if self.num_repeated:
            mask[: self.episode.turn_ends[self.num_repeated - 1]] = False
        return mask


@dataclass(frozen=True)
class SampledGroup:
    """One prompt, its completions and the stamp of the weights that generated them."""

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
    routed_experts: Sequence[bytes] = field(default=(), kw_only=True)
    """The routed experts of each completion with its prompt (common.routed_experts); empty if the engine
    returned none."""
    sampling_mask: Sequence[bytes] = field(default=(), kw_only=True)
    """The sampling masks of each completion (common.batches); empty if nothing was truncated."""
    segments: Sequence[Row] = field(default=(), kw_only=True)
    """The rows of agents' episodes, by sample; a completion then has no tokens. Empty without an agent."""
    left: Sequence[Left | None] = field(default=(), kw_only=True)
    """What the agent left behind in each sample; empty without an agent."""

    @property
    def rows(self) -> Sequence[Row]:
        """Returns the rows of the batch that the group becomes; those of a sample are neighbors."""
        return self.segments or [
            Row(
                sample,
                self.prompt.tokens,
                completion,
                self.episodes[sample] if self.episodes else None,
                self.routed_experts[sample] if self.routed_experts else None,
                self.sampling_mask[sample] if self.sampling_mask else None,
            )
            for sample, completion in enumerate(self.completions)
        ]

    @property
    def length(self) -> int:
        return max(len(row.completion.tokens) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of its samples with their prompts, as micro-batches count them (common.batches)."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True)
class ScoredGroup(SampledGroup):
    """A sampled group with one score per completion."""

    scores: Sequence[Score]
    scorer: str
    baseline: float | None = None
    """Reward of the prompt's greedy completion, if there is one."""
    columns: Mapping[str, Sequence[np.ndarray | bytes]] = field(default_factory=dict)
    """Outputs of other models for the rows: column of the batch -> one float32 [N], or encoded bytes, per row."""

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
    rows = [(group, place, row) for group in groups for place, row in enumerate(group.rows)]
    completions = [row.completion for _, _, row in rows]
    scores = [group.scores[row.sample] for group, _, row in rows]
    values = {
        "prompt_id": [group.prompt.prompt_id for group, _, _ in rows],
        "group": [group.index for group, _, _ in rows],
        "sample": [row.sample for _, _, row in rows],
        "segment": [row.segment for _, _, row in rows],
        "prompt_tokens": [row.prompt_tokens for _, _, row in rows],
        "tokens": [completion.tokens for completion in completions],
        "logprobs": [completion.logprobs for completion in completions],
        "reward": [score.reward for score in scores],
        "components": [sorted(score.components.items()) for score in scores],
        "baseline": [group.baseline for group, _, _ in rows],
        "loss_mask": [row.loss_mask(mask_truncated=mask_truncated) for _, _, row in rows],
        "finish_reason": [FINISH_REASONS[completion.finish_reason] for completion in completions],
        "policy_version": [group.stamp.version for group, _, _ in rows],
        "policy_digest": [group.stamp.digest for group, _, _ in rows],
        "scorer": [group.scorer for group, _, _ in rows],
        "seed": [completion.seed for completion in completions],
        "calls": [row.calls for _, _, row in rows],
        "routed_experts": [row.routed_experts for _, _, row in rows],
        "sampling_mask": [row.sampling_mask for _, _, row in rows],
    }
    for name in Episode.__dataclass_fields__:
        values[name] = [getattr(row.episode, name, None) for _, _, row in rows]
    for name in groups[0].columns if groups else ():
        values[name] = [group.columns[name][place] for group, place, _ in rows]
    columns = [
        _column(values[field.name], field.type) if field.name in values else pa.nulls(len(rows), field.type)
        for field in SAMPLE_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=SAMPLE_SCHEMA)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Returns `values` as Arrow, which reads lists of numbers faster from numpy."""
    if pa.types.is_list(kind) and not pa.types.is_struct(kind.value_type):
        dtype = kind.value_type.to_pandas_dtype()
        distinct = {id(value): value for value in values if value is not None}  # samples of a prompt share its tokens
        arrays = {key: np.asarray(value, dtype) for key, value in distinct.items()}
        values = [arrays.get(id(value)) for value in values]
    return pa.array(values, kind)


def to_episodes(groups: Sequence[SampledGroup]) -> pa.Table | None:
    """Returns what the agents of `groups` asked and left behind, in the order of `groups`; None without agents."""
    rows = [
        left.row(group.prompt.prompt_id, group.index, sample)
        for group in groups
        for sample, left in enumerate(group.left)
        if left
    ]
    return pa.Table.from_pylist(rows, schema=EPISODE_SCHEMA) if rows else None


def answers_of(groups: Sequence[SampledGroup]) -> dict[int, str | None]:
    """Returns the answer of each group's row, by the group's index."""
    return {group.index: group.prompt.answer for group in groups}


def rewards_by_column(groups: Sequence[ScoredGroup], column: str | None) -> dict[str, float]:
    """Returns the mean reward of the samples of each value, named `reward[<column>=<value>]`; none without a column."""
    if column is None:
        return {}
    rewards: dict[str, list[np.ndarray]] = defaultdict(list)
    name = value_name(column)
    for group in groups:
        rewards[value_name(group.prompt.extra.get(column))].append(group.rewards)
    return {f"reward[{name}={value}]": float(np.concatenate(rewards[value]).mean()) for value in sorted(rewards)}


def conversation_of(row: Record, text: Callable[[Sequence[int]], str]) -> pb.Conversation:
    """Returns a row of a batch as texts, which `text` makes of tokens. Without an environment it has one turn."""
    tokens, episode = row["tokens"], Episode.of(row)
    parts = [] if episode else [pb.ConversationPart(text=text(tokens), reward=row["reward"])]
    if episode:
        turns, replies = episode.turns(tokens), episode.replies(tokens)
        for turn, reward, reply in zip(turns, episode.turn_rewards, replies, strict=True):
            parts.append(pb.ConversationPart(text=text(turn), reward=reward))
            if reply:
                parts.append(pb.ConversationPart(text=text(reply)))
    same = {name: row[name] for name in ("prompt_id", "sample", "reward", "finish_reason")}
    return pb.Conversation(prompt=text(row["prompt_tokens"]), parts=parts, answer=row.get("answer"), **same)
