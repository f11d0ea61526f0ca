"""Tests that a run names the cause if its engine is known to compute a model otherwise than the trainer."""

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp

from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.coordinator.rl.step import Batch, commit
from tests.support import raises


class FakeTrainer:
    """Answers an update with a difference of 0.3 nats, or with `error`."""

    def __init__(self, model_type: str, error: LockstepError | None = None, **config: Any):
        card = ModelCard(files={"config.json": json.dumps({"model_type": model_type, **config}).encode()})
        self.opened, self._error = SimpleNamespace(model_card=card), error

    async def train(self, *args: object, **kwargs: object) -> tuple[int, dict[str, float]]:
        if self._error:
            raise self._error
        return 1, {"logprob_diff_max": 0.3}


async def committed(trainer: FakeTrainer, version: int = 0) -> tuple[int, dict[str, float]]:
    settings = SimpleNamespace(lag=SimpleNamespace(versions=0))
    run = SimpleNamespace(phase=lambda phase: nullcontext(), batch_id=str, config=SimpleNamespace(trainer=settings))
    batch, stamp = Batch(cast(Any, None), PolicyStamp(version=version), None), PolicyStamp(version=version)
    return await commit(cast(Any, run), cast(Any, SimpleNamespace(trainer=trainer, critic=None)), batch, stamp)


async def test_the_first_step_says_how_much_and_why(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert (await committed(FakeTrainer("cohere2")))[0] == 1
        assert "0.3 nats" in caplog.text and "sliding window has one token more" in caplog.text
        caplog.clear()
        await committed(FakeTrainer("mistral3", text_config={"model_type": "ministral3"}))
        assert "beyond original_max_position_embeddings" in caplog.text
        caplog.clear()
        await committed(FakeTrainer("cohere2"), version=1)
        await committed(FakeTrainer("qwen3"))
    assert not caplog.text


async def test_a_refusal_names_the_cause():
    refusal = PreconditionFailed("they disagree", reason=Reason.LOGPROB_DIFF, logprob_diff_max=3.0)
    with raises(PreconditionFailed, reason=Reason.LOGPROB_DIFF) as raised:
        await committed(FakeTrainer("ernie4_5_moe", refusal))
    assert "they disagree. Likely cause: vLLM on CPU leaves" in raised.value.message
    assert raised.value.metadata == {"logprob_diff_max": "3.0"}
    with raises(PreconditionFailed, reason=Reason.LOGPROB_DIFF) as raised:
        await committed(FakeTrainer("qwen3", refusal))
    assert raised.value.message == "they disagree"
