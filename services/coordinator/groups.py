"""Prompt groups on their way from prompt to batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp

from services.common.batch import SAMPLE_SCHEMA
from services.coordinator.data.prompts import Prompt

FINISH_REASONS = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class SampledGroup:
    """One prompt, its completions, and the weights that the engine held while it drew them."""

    index: int
    prompt: Prompt
    completions: Sequence[Completion]
    stamp: PolicyStamp


@dataclass(frozen=True)
class ScoredGroup(SampledGroup):
    """The same with one score for each completion."""

    scores: Sequence[Score]
    scorer: str

    @property
    def rewards(self) -> np.ndarray:
        """float64 [n]."""
        return np.array([score.reward for score in self.scores])


def to_table(groups: Sequence[ScoredGroup]) -> pa.Table:
    """The batch without advantages, in the order of the groups' indices whatever order they finished in."""
    rows = [row for group in sorted(groups, key=lambda g: g.index) for row in _rows(group)]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def _rows(group: ScoredGroup) -> list[dict[str, object]]:
    return [
        {
            "prompt_id": group.prompt.prompt_id,
            "group": group.index,
            "sample": sample,
            "prompt_tokens": group.prompt.tokens,
            "tokens": completion.tokens,
            "logprobs": completion.logprobs,
            "reward": score.reward,
            "components": list(score.components.items()),
            "finish_reason": FINISH_REASONS[completion.finish_reason],
            "policy_version": group.stamp.version,
            "policy_digest": group.stamp.digest,
            "scorer": group.scorer,
            "seed": completion.seed,
        }
        for sample, (completion, score) in enumerate(zip(group.completions, group.scores, strict=True))
    ]
