"""Runs the scorers of one run and combines their scores into rewards."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.config.reward import RewardConfig
from services.common.errors import InvalidInput, Reason
from services.common.rewards import weighted_sum
from services.common.tasks import keep
from services.reward.errors import FailureReason, ScoringError
from services.reward.metrics import RewardMetrics
from services.reward.scorers.base import Item, PythonScorer, Scorer, gather_scores
from services.reward.scorers.code import CodeScorer
from services.reward.scorers.model import HttpScorer, JudgeScorer, ModelScorer
from services.reward.scorers.text import AnswerScorer, ExactScorer, FormatScorer, Gsm8kScorer, LengthScorer, MathScorer

log = logging.getLogger(__name__)

SCORERS: dict[str, Callable[..., Scorer]] = {
    "exact": ExactScorer,
    "answer": AnswerScorer,
    "gsm8k": Gsm8kScorer,
    "math": MathScorer,
    "format": FormatScorer,
    "length": LengthScorer,
    "python": PythonScorer,
    "judge": JudgeScorer,
    "http": HttpScorer,
    "model": ModelScorer,
    "code": CodeScorer,
}


@dataclass(frozen=True)
class Outcome:
    """A sample's reward, or the first failure in config order; `components` has the scores that succeeded.

    A scorer of weight 0 only records, so that its failure is none of the sample.
    """

    reward: float
    components: dict[str, float]
    failure: ScoringError | None
    failed_scorer: str


class ScoringRun:
    """Scores samples as one config says. Owns processes, so always `close` it."""

    def __init__(self, config: RewardConfig, metrics: RewardMetrics | None = None):
        self._config, self._metrics = config, metrics or RewardMetrics()
        self._scorers = [SCORERS[scorer.kind](scorer, config) for scorer in config.scorers]
        self._scoring = set[asyncio.Task[list[list[float | ScoringError] | ScoringError]]]()
        self._closed = False

    @property
    def scorer(self) -> str:
        """As in `math 1/math-verify-0.9.0 x 1 + length 1 x 0.1`: name, version and weight of each."""
        parts = zip(self._config.scorers, self._scorers, strict=True)
        return " + ".join(f"{config.component} {scorer.version} x {config.weight:g}" for config, scorer in parts)

    @property
    def reads_tokens(self) -> bool:
        return any(scorer.reads_tokens for scorer in self._scorers)

    async def open(self) -> None:
        """Starts all scorers. Raises InvalidInput, which names the first that cannot start."""
        results = await asyncio.gather(*(scorer.open() for scorer in self._scorers), return_exceptions=True)
        for index, (config, error) in enumerate(zip(self._config.scorers, results, strict=True)):
            if isinstance(error, ScoringError):
                message = f"reward.scorers.{index} ({config.component}) cannot start: {error.detail}"
                raise InvalidInput(message, reason=Reason.INVALID_CONFIG, field=f"reward.scorers.{index}") from error
            if error is not None:
                raise error

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Scores one prompt group with all scorers concurrently. Returns one outcome per item, in order."""
        try:
            scored = await keep(self._scoring, gather_scores(scorer.score_group(items) for scorer in self._scorers))
        except asyncio.CancelledError:
            if not self._closed:
                raise
            scored = [ScoringError(FailureReason.CRASHED, "the run was closed")] * len(self._scorers)
        columns = [[column] * len(items) if isinstance(column, ScoringError) else column for column in scored]
        return [self._combine([column[index] for column in columns]) for index in range(len(items))]

    async def close(self) -> None:
        """Ends all scorers; samples that are being scored fail as CRASHED."""
        self._closed = True
        for scoring in self._scoring:
            scoring.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)
        await asyncio.gather(*(scorer.close() for scorer in self._scorers))

    def _combine(self, results: Sequence[float | ScoringError]) -> Outcome:
        components, failure, failed_scorer = dict[str, float](), None, ""
        for config, result in zip(self._config.scorers, results, strict=True):
            outcome = "scored"
            if isinstance(result, ScoringError):
                outcome = result.reason.lower()
                if not config.weight:
                    log.warning("scorer %s, whose weight is 0, failed: %s", config.component, result.detail)
                elif failure is None:
                    failure, failed_scorer = result, config.component
            else:
                components[config.component] = result
            self._metrics.scores.labels(config.component, outcome).inc()
        scored = [scorer for scorer in self._config.scorers if scorer.component in components]
        reward = weighted_sum((scorer.weight, components[scorer.component]) for scorer in scored)
        if not failure and not math.isfinite(reward):  # each score is finite, but not their weighted sum
            detail = f"the weighted sum of {components} is {reward}: lower the weights or the scale of the scores"
            failure, failed_scorer = ScoringError(FailureReason.ERROR, detail), " + ".join(components)
        return Outcome(0.0 if failure else reward, components, failure, failed_scorer)
