"""Scores with models: a reward model in a worker process, a judge behind a chat API, or a service behind HTTP."""

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from services.common.config.reward import HttpConfig, JudgeConfig, ModelConfig, RewardConfig, parse_template
from services.common.process import missing_modules
from services.reward.errors import FailureReason, ScoringError
from services.reward.graders.texts import after_reasoning
from services.reward.processes.functions import FunctionPool, function_target
from services.reward.remote import MayPassError, Remote
from services.reward.scorers.base import Item, Scorer, columns

# Config keys that are passed to the worker's `load`.
LOAD_FIELDS = {"path", "label", "template", "device", "dtype", "batch_size", "max_tokens"}


class ModelScorer(Scorer):
    """Scores with a logit of a sequence-classification model. See services/reward/graders/model.py."""

    def __init__(self, config: ModelConfig, reward: RewardConfig):
        self._pool = FunctionPool(
            function_target(
                "services.reward.graders.model:load",
                init=config.model_dump(include=LOAD_FIELDS),
                start_timeout_s=config.start_timeout_s,
            ),
            num_workers=1,
            timeout_s=config.timeout_s,
        )

    async def open(self) -> None:
        if missing := missing_modules("reward-model"):
            detail = f"{', '.join(missing)} is missing: pip install 'lockstep-rl[reward-model]'"
            raise ScoringError(FailureReason.ERROR, detail)
        await self._pool.open()
        self.version = self._pool.version  # the hash of the model's files and of the settings that affect the score

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        return await self._pool.call_group(columns(items) | {"messages": [item.messages for item in items]}, len(items))

    async def close(self) -> None:
        await self._pool.close()


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

    def __init__(self, config: JudgeConfig, reward: RewardConfig):
        self._config = config
        self._template = parse_template(config.template)
        timeout_s = config.timeout_s or reward.timeout_s
        self._remote = Remote(config, timeout_s, request_timeout_s=config.request_timeout_s)
        target = function_target(
            "services.reward.graders.texts:extract_score", max_memory_bytes=int(reward.max_memory_gib * 2**30)
        )
        self._pool = FunctionPool(target, num_workers=1, timeout_s=reward.timeout_s)
        settings = config.model_dump_json(exclude=_NOT_IN_VERSION)
        self.version = f"4/{config.model}/{hashlib.sha256(settings.encode()).hexdigest()[:12]}"

    async def open(self) -> None:
        await self._remote.open()
        await self._pool.open()

    async def score(self, item: Item) -> float:
        extra = json.dumps(item.extra, ensure_ascii=False)
        values = {"prompt": item.prompt, "answer": item.answer, "completion": item.completion, "extra": extra, None: ""}
        content = "".join(literal + values[field] for literal, field in self._template)
        request: dict[str, object] = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        set_keys = {key: value for key, value in request.items() if value is not None}
        return await self._remote.post(set_keys | self._config.extra_body, self._read)

    async def _read(self, answer: object) -> float:
        """Returns the score in the judge's text. If there is none, or one out of range, the judge is asked again."""
        call = {"text": _content(answer), "pattern": self._config.score_pattern}
        try:
            score = await self._pool.call(call)
        except ScoringError as error:
            raise (MayPassError(error) if error.reason is FailureReason.ERROR else error) from None
        least, most = self._config.limits
        if not least <= score <= most and math.isfinite(score):
            detail = f"the judge's score {score:g} is not from {least:g} to {most:g} (score_range)"
            raise MayPassError(ScoringError(FailureReason.ERROR, detail))
        return score * self._config.scale

    async def close(self) -> None:
        await self._remote.close()
        await self._pool.close()


def _content(answer: Any) -> str:
    """Returns what the judge says after its reasoning.

    Raises:
        MayPassError: There is none, as in the error of a router that answers with status 200, or it was cut off, so a
            score in it may be one that the judge quotes.
    """
    choice = content = reason = None
    with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
        choice = answer["choices"][0]
        reason, content = choice.get("finish_reason"), choice["message"]["content"]
    if reason in ("length", "content_filter"):
        hint = ": raise max_tokens, which limits its reasoning too" if reason == "length" else ""
        raise MayPassError(ScoringError(FailureReason.ERROR, f"the judge's answer was cut off: {reason}{hint}"))
    if not isinstance(content, str):
        detail = f"the judge's answer has no choices[0].message.content: {choice or answer!r:.300}"
        raise MayPassError(ScoringError(FailureReason.ERROR, detail))
    return after_reasoning(content)


_MAX_VERSION_CHARS = 200
_MAX_ERROR_CHARS = 1000


class HttpScorer(Scorer):
    """Scores with the server's answers."""

    def __init__(self, config: HttpConfig, reward: RewardConfig):
        self._remote = Remote(config, config.timeout_s or reward.timeout_s)
        self.version = ""

    async def open(self) -> None:
        await self._remote.open()
        await self.score_group([])  # asks the server for its version

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        answer = await self._remote.post({"samples": [item.fields() for item in items]})
        scores, version = _parse(answer, len(items))
        if version != (self.version or version):
            message = f"its version changed from {self.version} to {version} since OpenRun; close and reopen the run"
            raise _error(message)
        self.version = version
        return scores

    async def close(self) -> None:
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
