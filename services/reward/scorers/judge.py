"""Scores with a language model as judge, behind an OpenAI-compatible chat-completions URL."""

import hashlib
import json
import math
from typing import Any

from services.common.config.reward.remote import JudgeConfig, parse_template
from services.common.config.reward.section import RewardConfig
from services.reward.processes.pool import Target, WorkerPool
from services.reward.remote import MayPassError, Remote
from services.reward.scorers.base import FailureReason, Item, Scorer, ScoringError

_TOO_MANY_REQUESTS = frozenset({408, 429})
_NOT_IN_VERSION = {"name", "weight", "api_key_file", "timeout_s", "request_timeout_s", "max_retries"} | {
    "requests_per_s",
    "max_concurrent",
}


class JudgeScorer(Scorer):
    """Scores with the number that the judge writes, times `scale`.

    The texts of a sample are inserted into the template unchanged and in one pass, so braces in them have no meaning.
    The pattern is matched in a worker, because a sample may make the judge write a text on which that takes exponential
    time.
    """

    def __init__(self, config: JudgeConfig, run: RewardConfig):
        self._config = config
        self._template = parse_template(config.template)
        timeout_s = config.timeout_s or run.timeout_s
        self._remote = Remote(
            config, timeout_s, request_timeout_s=config.request_timeout_s, retry_statuses=_TOO_MANY_REQUESTS
        )
        target = Target("services.reward.graders.judge:extract", max_memory_bytes=int(run.max_memory_gib * 2**30))
        self._pool = WorkerPool(target, num_workers=1, timeout_s=run.timeout_s)
        settings = config.model_dump_json(exclude=_NOT_IN_VERSION)
        self.version = f"{config.model}/{hashlib.sha256(settings.encode()).hexdigest()[:12]}"

    async def open(self) -> None:
        """Reads the key and starts the worker; sends nothing to the judge."""
        await self._remote.open()
        await self._pool.open()

    async def score(self, item: Item) -> float:
        """Returns the judge's score.

        Raises:
            ScoringError: TIMEOUT or ERROR if the judge does not answer, ERROR if its answer has no number, or again and
                again one out of range.
        """
        request: dict[str, object] = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": self._render(item)}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        return await self._remote.post({key: value for key, value in request.items() if value is not None}, self._read)

    async def _read(self, answer: object) -> float:
        """Returns the score in the judge's answer. One out of range is no score, so the judge is asked again."""
        score = await self._pool.call({"text": _content(answer), "pattern": self._config.score_pattern})
        least, most = self._config.limits
        if not least <= score <= most and math.isfinite(score):
            detail = f"the judge's score {score:g} is not from {least:g} to {most:g} (score_range)"
            raise MayPassError(ScoringError(FailureReason.ERROR, detail))
        return score * self._config.scale

    async def close(self) -> None:
        """Ends all requests and kills the worker."""
        await self._remote.close()
        await self._pool.close()

    def _render(self, item: Item) -> str:
        extra = json.dumps(item.extra, ensure_ascii=False)
        values = {"prompt": item.prompt, "answer": item.answer, "completion": item.completion, "extra": extra, None: ""}
        return "".join(literal + values[field] for literal, field in self._template)


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ScoringError(FailureReason.ERROR, "the judge's answer has no choices[0].message.content")
    return content
