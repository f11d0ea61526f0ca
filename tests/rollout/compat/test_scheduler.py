"""Tests that an engine sends the tokens of a sample in chunks, without losing or mixing any."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from services.common.config.rollout import RolloutConfig
from services.rollout.arguments import engine_arguments
from services.rollout.compat.recorded import ReturnsExperts, returning_experts
from services.rollout.compat.scheduler import InChunks, fewest_of

QUEUED, PREEMPTED = EngineCoreEventType.QUEUED, EngineCoreEventType.PREEMPTED
LENGTH = {"finish_reason": FinishReason.LENGTH}


class PlayedScheduler:
    """Returns the outputs that a test gives it.

    Requests that cannot go on are finished on the way, as vLLM does. Each output takes its log-probabilities from those
    of the step, as in vLLM.
    """

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.requests: dict[str, SimpleNamespace] = {}

    def update_from_output(self, said: dict[int, EngineCoreOutputs], step: Any) -> dict[int, EngineCoreOutputs]:
        for index, output in enumerate(outputs_of(said)):
            if output.new_logprobs is not None:
                output.new_logprobs = step.logprobs.slice_request(index, len(output.new_token_ids))
        for request in self.finish_requests(self.failing, None):
            said[0].outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR))
        return said

    def finish_requests(self, request_ids: Any, status: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(request_id=name) for name in request_ids]


class PlayedInChunks(InChunks, PlayedScheduler):
    def say(self, said: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        outputs = outputs_of(said)
        lists = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        counts = [len(output.new_token_ids) if output.new_logprobs else 0 for output in outputs]
        joined = [np.concatenate(arrays) for arrays in list(zip(*lists, strict=True))[:3]]
        logprobs = LogprobsLists(*joined, [0, *np.cumsum(counts).tolist()]) if joined else None
        return self.update_from_output(said, ModelRunnerOutput([], {}, logprobs=logprobs))  # type: ignore[arg-type]


def outputs_of(answers: dict[int, EngineCoreOutputs]) -> list[EngineCoreOutput]:
    return [output for answer in answers.values() for output in answer.outputs]


def token(name: str, *tokens: int, logprobs: bool = True, **more: Any) -> EngineCoreOutput:
    ids = np.array(tokens, np.int32)
    lists = LogprobsLists(ids[:, None], np.float32(-ids[:, None] / 3), ids + 100) if logprobs and tokens else None
    return EngineCoreOutput(request_id=name, new_token_ids=list(tokens), new_logprobs=lists, **more)


def step(*outputs: EngineCoreOutput, **more: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs), **more)


def sent(answers: dict[int, EngineCoreOutputs]) -> list[tuple[str, list[int]]]:
    return [(output.request_id, output.new_token_ids) for output in outputs_of(answers)]


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 34, 64, 65, 66, 1000])
@pytest.mark.parametrize("at_once", [1, 3])
def test_every_token_comes_once_in_order_with_its_logprob(num_tokens: int, at_once: int) -> None:
    played, received, num_messages = PlayedInChunks(), [], 0
    for begin in range(0, num_tokens, at_once):
        tokens = range(begin, min(begin + at_once, num_tokens))
        last = {"finish_reason": FinishReason.STOP, "stop_reason": 7} if tokens[-1] == num_tokens - 1 else {}
        others = [token("other", 5000 + begin)]
        for answer in played.say({0: step(token("it", *tokens, **last), *others)}).values():
            num_messages += 1
            buffers = MsgpackEncoder().encode(answer)
            assert len(buffers) == 1  # vLLM 0.26 sends a longer message of several frames from memory that it reuses
            received += MsgpackDecoder(EngineCoreOutputs).decode(buffers).outputs
    mine = [output for output in received if output.request_id == "it"]
    numbers = list(range(num_tokens))
    assert [number for output in mine for number in output.new_token_ids] == numbers
    lists = [output.new_logprobs for output in mine]
    assert np.concatenate([each.logprob_token_ids for each in lists]).tolist() == [[number] for number in numbers]
    expected = np.float32(-np.array(numbers)[:, None] / 3)
    assert np.array_equal(np.concatenate([each.logprobs for each in lists]), expected)
    assert np.concatenate([each.sampled_token_ranks for each in lists]).tolist() == [number + 100 for number in numbers]
    assert [output.finish_reason for output in mine] == [None] * (len(mine) - 1) + [FinishReason.STOP]
    assert mine[-1].stop_reason == 7
    assert list(played._unsent) == ["other"]
    assert num_messages <= 3 + num_tokens // 32 + num_tokens // at_once // 32


def test_most_steps_send_nothing() -> None:
    played = PlayedInChunks()
    said = [sent(played.say({0: step(token("a", number))})) for number in range(66)]
    first, second = list(range(1, 33)), list(range(33, 65))
    assert {number: tokens for number, tokens in enumerate(said) if tokens} == {
        0: [("a", [0])],
        32: [("a", first)],
        64: [("a", second)],
    }


def test_a_sample_without_logprobs_and_one_of_another_client() -> None:
    played = PlayedInChunks()
    for number in range(3):
        played.say({0: step(token("a", number, logprobs=False)), 1: step(token("b", number))})
    last = {0: step(token("a", 3, logprobs=False, **LENGTH)), 1: step(token("b", 4))}
    answers = played.say(last)
    assert list(answers) == [0] and sent(answers) == [("a", [1, 2, 3])]
    assert answers[0].outputs[0].new_logprobs is None
    answers = played.say({1: step(token("b", 5, **LENGTH))})
    assert list(answers) == [1] and sent(answers) == [("b", [1, 2, 4, 5])]
    assert not played._unsent


def test_one_that_fails_costs_no_other_its_tokens() -> None:
    played = PlayedInChunks()
    for number in range(3):
        played.say({0: step(token("a", number), token("b", number))})
    played.failing = {"b"}
    answers = played.say({0: step(token("a", 3, **LENGTH))})
    assert sent(answers) == [("a", [1, 2, 3]), ("b", [])]
    assert [output.finish_reason for output in answers[0].outputs] == [FinishReason.LENGTH, FinishReason.ERROR]
    assert not played._unsent


def test_an_end_without_tokens_has_no_logprobs() -> None:
    played, none = PlayedInChunks(), np.zeros((0, 1), np.int32)
    played.say({0: step(token("a", 1))})
    end = EngineCoreOutput("a", [], new_logprobs=LogprobsLists(none, none, none[:, 0]), **LENGTH)
    (output,) = played.say({0: step(end)})[0].outputs
    assert output.new_token_ids == [] and output.new_logprobs is None


def test_routes_of_every_step_are_sent() -> None:
    """vLLM 0.26 adds the routed experts of a step to its output: those of the prompt to the first, then one row per
    token."""
    played, rows = PlayedInChunks(), np.arange(10 + 39, dtype=np.uint8).reshape(-1, 1, 1)
    received = []
    for number in range(40):
        routed_experts = rows[:10] if number == 0 else rows[9 + number : 10 + number]
        last = LENGTH if number == 39 else {}
        for answer in played.say({0: step(token("it", number, routed_experts=routed_experts, **last))}).values():
            received += answer.outputs
    assert [len(output.new_token_ids) for output in received] == [1, 32, 7]
    assert np.array_equal(np.concatenate([output.routed_experts for output in received]), rows)


def test_an_end_says_how_many_tokens_all_others_have() -> None:
    played = PlayedInChunks()
    played.requests = {name: SimpleNamespace(num_output_tokens=number) for name, number in (("a", 7), ("b", 5))}
    (going, ended) = outputs_of(played.say({0: step(token("a", 1), token("c", 2, finish_reason=FinishReason.LENGTH))}))
    assert going.kv_transfer_params is None
    assert fewest_of(SimpleNamespace(kv_transfer_params=ended.kv_transfer_params)) == 5  # type: ignore[arg-type]
    played.requests = {}
    (last,) = outputs_of(played.say({0: step(token("a", 3, finish_reason=FinishReason.LENGTH))}))
    assert fewest_of(SimpleNamespace(kv_transfer_params=last.kv_transfer_params)) == 0  # type: ignore[arg-type]
    assert fewest_of(SimpleNamespace(kv_transfer_params=None)) == 0  # type: ignore[arg-type]


def test_what_vllm_counts_is_sent_at_once() -> None:
    played, prefill = PlayedInChunks(), PrefillStats()
    queued, preempted = (EngineCoreEvent(kind, 1.0) for kind in (QUEUED, PREEMPTED))
    (first,) = played.say({0: step(token("a", 5, prefill_stats=prefill, events=[queued]))})[0].outputs
    assert first.prefill_stats is prefill and first.events == [queued]
    answers = played.say({0: step(token("a", 6), scheduler_stats=SchedulerStats())})
    assert sent(answers) == [] and answers[0].scheduler_stats is not None
    answers = played.say({0: step(finished_requests={"b"})})
    assert answers[0].finished_requests == {"b"}
    answers = played.say({0: step(token("a", 7, events=[preempted]))})
    assert sent(answers) == [("a", [6, 7])] and answers[0].outputs[0].events == [preempted]


def test_what_is_aborted_is_forgotten() -> None:
    played = PlayedInChunks()
    played.say({0: step(token("a", 5), token("b", 6))})
    assert [request.request_id for request in played.finish_requests(["a", "c"], None)] == ["a", "c"]
    assert list(played._unsent) == ["b"]


@pytest.mark.parametrize("returns_routed_experts", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_takes_it_of_the_kind_that_vllm_would_take(
    is_async: bool, returns_routed_experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler.__init__", lambda self, **arguments: None)
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self, **arguments: None)
    named = engine_arguments(RolloutConfig(max_model_len=8), "model", seed=0)["scheduler_cls"]
    arguments = returning_experts({"enforce_eager": True}, is_gpu=False) if returns_routed_experts else {}
    additional_config = (arguments or {}).get("additional_config", {})
    made = resolve_obj_by_qualname(named)(
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=is_async),
            additional_config=additional_config,
            speculative_config=None,
        )
    )
    assert isinstance(made, InChunks) and isinstance(made, AsyncScheduler) == is_async
    assert isinstance(made, ReturnsExperts) == returns_routed_experts
