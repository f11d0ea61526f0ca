"""Holds episodes: samples in which an environment answers the policy's turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from lockstep.types.v1.types_pb2 import Completion, FinishReason

from services.common.rewards import total
from services.coordinator.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Episode:
    """Says which tokens of a sample are the policy's turns. All others are the environment's and are not trained on.

    Turn k has the tokens from `turn_begins[k]` to `turn_ends[k]`, exclusive, and the reward `turn_rewards[k]`, which
    is the environment's times `environment.weight`.
    """

    turn_begins: Sequence[int]
    turn_ends: Sequence[int]
    turn_rewards: Sequence[float]
    environment: str
    """Name and version of the environment."""

    @classmethod
    def of(cls, row: Mapping[str, object]) -> Self | None:
        """Returns the episode of a row of a batch; None if the row was sampled without an environment."""
        if row["environment"] is None:
            return None
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> Self:
        """Returns the episode of a sample that has no tokens because its environment failed."""
        return cls((), (), (), "")

    @property
    def reward(self) -> float:
        """Returns the sum of the turns' rewards."""
        return total(self.turn_rewards)

    def loss_mask(self, num_tokens: int) -> list[bool]:
        """Returns whether the policy sampled each of `num_tokens` tokens."""
        mask = [False] * num_tokens
        for begin, end in zip(self.turn_begins, self.turn_ends, strict=True):
            mask[begin:end] = [True] * (end - begin)
        return mask

    def turns(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """Returns the tokens of each turn."""
        return [tokens[begin:end] for begin, end in zip(self.turn_begins, self.turn_ends, strict=True)]

    def replies(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """Returns the tokens that the environment added after each turn; none after the last."""
        nexts = [*self.turn_begins[1:], len(tokens)][: len(self.turn_ends)]  # a failed episode has no turn
        return [tokens[end:begin] for end, begin in zip(self.turn_ends, nexts, strict=True)]


@dataclass
class Stream:
    """Holds the tokens of an episode in progress. Tokens are only appended, exactly as they were sampled or sent."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    routes: bytearray = field(default_factory=bytearray)
    kept: list[tuple[bytes, int]] = field(default_factory=list)
    """The kept sets and number of tokens of each part of `tokens`, for common.batches.kept.join_kept."""

    @property
    def context(self) -> tuple[int, ...]:
        """Returns the prompt of the next turn: all tokens so far."""
        return (*self.prompt, *self.tokens)

    @property
    def num_seen(self) -> int:
        """Returns the number of tokens that the engine has seen, as prompts or by sampling them."""
        return len(self.prompt) + (self.ends[-1] if self.ends else 0)

    def add_turn(self, completion: Completion, routes: bytes = b"", kept: bytes = b"") -> None:
        """Appends a sampled turn with its kept sets, and the routes of the tokens that have none yet.

        `routes` are those of all tokens up to here but the last. Tokens of earlier turns keep the routes that they were
        sampled with.
        """
        self.routes += routes[len(self.routes) :]
        self.begins.append(len(self.tokens))
        self.tokens.extend(completion.tokens)
        self.logprobs.extend(completion.logprobs)
        self.kept.append((kept, len(completion.tokens)))
        self.ends.append(len(self.tokens))

    def add_context(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample."""
        self.tokens.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        self.kept.append((b"", len(tokens)))

    def end(self, reason: FinishReason, seed: int, environment: str) -> tuple[Completion, Episode]:
        """Returns the sample and its episode."""
        completion = Completion(tokens=self.tokens, logprobs=self.logprobs, finish_reason=reason, seed=seed)
        return completion, Episode(self.begins, self.ends, self.rewards, environment)


def final_text(completion: Completion, episode: Episode | None, tokenizer: Tokenizer) -> str:
    """Returns the text that scorers judge: that of the last turn."""
    turns = episode.turns(completion.tokens) if episode else [completion.tokens]
    return tokenizer.decode(turns[-1]) if turns else ""


def num_sampled(completion: Completion, episode: Episode | None) -> int:
    """Returns the number of tokens that the policy sampled."""
    return sum(map(len, episode.turns(completion.tokens))) if episode else len(completion.tokens)
