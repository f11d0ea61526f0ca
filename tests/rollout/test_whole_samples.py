"""An engine tells of a sample once: what vLLM's scheduler says step by step is kept until the last of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from services.rollout.whole_samples import WholeSamples, scheduler


class PlayedScheduler:
    """Says what it is given to say."""

    def __init__(self) -> None:
        self.requests: dict[str, object] = {}

    def update_from_output(self, said: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        return said

    def finish_requests(self, request_ids: Any, status: Any) -> list[str]:
        gone = [name for name in self.requests if request_ids is None or name in request_ids]
        for name in gone:
            del self.requests[name]
        return gone


class PlayedWhole(WholeSamples, PlayedScheduler):
    pass


def token(name: str, *tokens: int, logprobs: bool = True, **more: Any) -> EngineCoreOutput:
    ids = np.array(tokens, np.int32)
    lists = LogprobsLists(ids[:, None], np.float32(-ids[:, None] / 3), ids + 100) if logprobs and tokens else None
    return EngineCoreOutput(request_id=name, new_token_ids=list(tokens), new_logprobs=lists, **more)


def step(*outputs: EngineCoreOutput, **more: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs), **more)


def test_all_tokens_come_with_the_last_one() -> None:
    played = PlayedWhole()
    assert played.update_from_output({0: step(token("a", 5), token("b", 7))}) == {}
    assert played.update_from_output({0: step(token("b", 8, 9), token("a", 6))}) == {}
    (only,) = played.update_from_output({0: step(token("b", 1, finish_reason=FinishReason.STOP, stop_reason=1))})[
        0
    ].outputs
    assert (only.request_id, only.new_token_ids, only.finish_reason, only.stop_reason) == (
        "b",
        [7, 8, 9, 1],
        FinishReason.STOP,
        1,
    )
    tokens, logprobs, ranks, _ = only.new_logprobs
    assert tokens.tolist() == [[7], [8], [9], [1]]
    assert np.array_equal(logprobs, np.float32([[-7], [-8], [-9], [-1]]) / np.float32(3))
    assert ranks.tolist() == [107, 108, 109, 101]
    (other,) = played.update_from_output({0: step(token("a", 2, finish_reason=FinishReason.LENGTH))})[0].outputs
    assert other.new_token_ids == [5, 6, 2]
    assert not played._begun


def test_a_sample_of_one_token_and_one_without_logprobs() -> None:
    played = PlayedWhole()
    last = {"finish_reason": FinishReason.LENGTH}
    said = {0: step(token("a", 5, **last)), 1: step(token("b", 6, logprobs=False, **last))}
    answers = played.update_from_output(said)
    assert answers[0].outputs[0].new_logprobs.logprobs.shape == (1, 1)
    assert (answers[1].outputs[0].new_token_ids, answers[1].outputs[0].new_logprobs) == ([6], None)


def test_what_vllm_counts_is_sent_at_once_and_with_the_sample() -> None:
    played = PlayedWhole()
    begun, ended = (EngineCoreEvent(kind, 1.0) for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.PREEMPTED))
    prefill = PrefillStats()
    first = token("a", 5, prefill_stats=prefill, events=[begun])
    answers = played.update_from_output({0: step(first, scheduler_stats=SchedulerStats())})
    assert answers[0].outputs == [] and answers[0].scheduler_stats is not None
    last = token("a", 6, events=[ended], finish_reason=FinishReason.STOP)
    (whole,) = played.update_from_output({0: step(last)})[0].outputs
    assert whole.prefill_stats is prefill and whole.events == [begun, ended]


@pytest.mark.parametrize("aborted", [None, {"a"}])
def test_what_is_aborted_is_forgotten(aborted: set[str] | None) -> None:
    played = PlayedWhole()
    played.requests = {"a": object(), "b": object()}
    played.update_from_output({0: step(token("a", 5), token("b", 6))})
    assert played.finish_requests(aborted, None) == (["a"] if aborted else ["a", "b"])
    assert list(played._begun) == (["b"] if aborted else [])


@pytest.mark.parametrize("is_async", [False, True])
def test_it_is_of_the_kind_that_vllm_would_take(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler.__init__", lambda self, **arguments: None)
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self, **arguments: None)
    made = scheduler(SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async)))
    assert isinstance(made, WholeSamples) and isinstance(made, AsyncScheduler) == is_async
