"""Scores answers to questions by exact match, as SQuAD normalizes text (arXiv 1606.05250)."""

from services.common.config.reward.section import AnswerConfig, RewardConfig
from services.reward.graders.completion import after_reasoning
from services.reward.graders.texts import normalize
from services.reward.scorers.base import FailureReason, Item, Scorer, ScoringError

_OPEN, _CLOSE = "<answer>", "</answer>"


class AnswerScorer(Scorer):
    """Scores 1 if the text in the last <answer> is one of the accepted answers, else 0."""

    version = "2"

    def __init__(self, config: AnswerConfig, run: RewardConfig):
        self._key = config.answers_key

    async def score(self, item: Item) -> float:
        """Returns 1.0 or 0.0."""
        accepted = {normalize(answer) for answer in self._accepted(item)} - {""}
        if not accepted:
            raise ScoringError(FailureReason.INVALID_ANSWER, "every accepted answer is empty")
        _, opened, rest = after_reasoning(item.completion).rpartition(_OPEN)
        found, closed, _ = rest.partition(_CLOSE)
        return float(bool(opened and closed) and normalize(found) in accepted)

    def _accepted(self, item: Item) -> list[str]:
        if self._key is None:
            return [item.answer]
        if self._key not in item.extra:
            detail = f"no column {self._key!r}: change the scorer's answers_key or data.extra_columns"
            raise ScoringError(FailureReason.INVALID_ANSWER, detail)
        answers = item.extra[self._key]
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise ScoringError(FailureReason.INVALID_ANSWER, f"{self._key} is not a list of texts: {answers!r:.200}")
        return answers
