"""Converts a sample to texts in order, with the rewards of the turns, for people to read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from services.coordinator.data.episodes import Episode
from services.coordinator.data.reading.parquet import Record


@dataclass(frozen=True)
class Part:
    """Holds the text of a turn of the policy with its reward, or the environment's reply, which has none."""

    text: str
    reward: float | None


@dataclass(frozen=True)
class Conversation:
    """Holds one sample of a batch. Without an environment it has one turn, the completion."""

    prompt_id: str
    sample: int
    prompt: str
    parts: Sequence[Part]
    reward: float
    """Reward of the whole sample, including the scorers'."""
    finish_reason: str

    @classmethod
    def of(cls, row: Record, text: Callable[[Sequence[int]], str]) -> Self | None:
        """Returns the conversation of a row of a batch, or None if it was sampled without an environment.

        Args:
            row: The row.
            text: Returns the text to show for some tokens.
        """
        episode = Episode.of(row)
        if episode is None:
            return None
        parts: list[Part] = []
        turns, replies = episode.turns(row["tokens"]), episode.replies(row["tokens"])
        for turn, reward, reply in zip(turns, episode.turn_rewards, replies, strict=True):
            parts.append(Part(text(turn), reward))
            if reply:
                parts.append(Part(text(reply), None))
        return cls._of_parts(row, parts, text)

    @classmethod
    def of_any(cls, row: Record, text: Callable[[Sequence[int]], str]) -> Self:
        """Returns the conversation of a row of a batch, like `of`, also of a single completion."""
        return cls.of(row, text) or cls._of_parts(row, [Part(text(row["tokens"]), row["reward"])], text)

    @classmethod
    def _of_parts(cls, row: Record, parts: Sequence[Part], text: Callable[[Sequence[int]], str]) -> Self:
        prompt = text(row["prompt_tokens"])
        return cls(row["prompt_id"], row["sample"], prompt, parts, row["reward"], row["finish_reason"])
