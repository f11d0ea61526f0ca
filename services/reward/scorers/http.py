"""Calls a scorer at a URL with one POST of JSON per prompt group.

    POST url          Content-Type: application/json, and Authorization: Bearer ... with api_key_file
    {"samples": [{"prompt": "...", "answer": "...", "extra": {...}, "completion": "...", "num_tokens": 12,
                  "finish_reason": "stop"}, ...]}

    200
    {"scores": [1.0, {"error": "why this sample has no score"}, ...], "version": "my-scorer 3"}

`scores` has one finite number or one error per sample, in order; no other keys are allowed. `version` identifies the
scorer: as long as it stays the same, the same sample must get the same score. An empty group is sent when the run opens
to learn the version. If a later answer has another version, its group fails, because all rewards of a run must come
from one scorer. `finish_reason` is stop or length. A group may be sent again after a 5xx status or a broken connection;
any other status fails the group. The answer may have at most 4 MiB and must not be compressed.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict

from services.common.config.reward.remote import HttpConfig
from services.common.config.reward.section import RewardConfig
from services.reward.remote import Remote
from services.reward.scorers.base import FailureReason, Item, Scorer, ScoringError

_MAX_VERSION_CHARS = 200
_MAX_ERROR_CHARS = 1000


class HttpScorer(Scorer):
    """Scores with the server's answers."""

    def __init__(self, config: HttpConfig, run: RewardConfig):
        self._remote = Remote(config, config.timeout_s or run.timeout_s)
        self.version = ""

    async def open(self) -> None:
        """Asks the server for its version.

        Raises:
            ScoringError: The server does not answer as described above.
        """
        await self._remote.open()
        await self.score_group([])

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Scores the group with one request.

        Raises:
            ScoringError: TIMEOUT or ERROR, because there is no valid answer or the scorer's version changed.
        """
        answer = await self._remote.post({"samples": [asdict(item) for item in items]})
        scores, version = _parse(answer, len(items))
        if version != (self.version or version):
            message = f"its version changed from {self.version} to {version} since OpenRun; close and reopen the run"
            raise _error(message)
        self.version = version
        return scores

    async def close(self) -> None:
        """Ends all requests in progress."""
        await self._remote.close()


def _parse(answer: object, num_samples: int) -> tuple[list[float | ScoringError], str]:
    if not isinstance(answer, dict) or set(answer) != {"scores", "version"}:
        raise _error("the answer is not an object with only the keys scores and version")
    scores, version = answer["scores"], answer["version"]
    if not isinstance(version, str) or not version.isprintable() or not 0 < len(version) <= _MAX_VERSION_CHARS:
        raise _error(f"version: must be 1 to {_MAX_VERSION_CHARS} printable characters")
    if not isinstance(scores, list) or len(scores) != num_samples:
        raise _error(f"scores: must be a list of {num_samples}, one for each sample")
    return [_parse_score(score) for score in scores], version


def _parse_score(score: object) -> float | ScoringError:
    if isinstance(score, dict) and set(score) == {"error"} and isinstance(score["error"], str):
        return _error(score["error"][:_MAX_ERROR_CHARS])
    try:
        if isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score):
            return float(score)
    except OverflowError:  # an integer too large for a float
        pass
    raise _error(f"a score must be a finite number or an error, not {str(score)[:100]}")


def _error(detail: str) -> ScoringError:
    return ScoringError(FailureReason.ERROR, detail)
