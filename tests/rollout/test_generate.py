"""Tests Generate: bad requests, truncation, long prompts, canceling, stop strings, and what an answer says."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.types.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, PolicyStamp, SamplingParams

from services.common.batches import tokens_sha256
from services.common.errors import InvalidInput
from tests.rollout.rollout_stack import MAX_MODEL_LEN, PROMPTS, PlayedTrainer
from tests.support import PATIENCE_S, VOCAB, cpu_seconds, engine_of, raises

_BATCH_TOKENS = 2048
"""Tokens that the engine computes at once (vLLM's max_num_batched_tokens), as services/rollout/arguments.py sets it."""
NO_TOKENS = (0, 1)  # special tokens, which have no text


async def publish(played: PlayedTrainer, version: int) -> PolicyStamp:
    played.draw(seed=version)
    return await played.publish(version)


@pytest.mark.parametrize("length", [0, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
async def test_a_prompt_that_does_not_fit_is_named(played: PlayedTrainer, length: int):
    stamp = await publish(played, 101)
    with raises(InvalidInput, field="prompts") as raised:
        await played.replica.generate(stamp, [PROMPTS[0], [3] * length])
    assert f"prompt of {length} tokens" in raised.value.message
    assert "\n" not in raised.value.message
    # The good prompt of the same call is aborted with it, and the engine goes on.
    await played.assert_exact(stamp)
    assert (await played.replica.info()).samples_in_flight == 0


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": 0.0099}, "temperature 0.0099: must be 0 or at least 0.01"),
    ],
)
async def test_impossible_sampling_is_the_callers_mistake(played: PlayedTrainer, sampling: dict, field: str):
    stamp = await publish(played, 102)
    with pytest.raises(InvalidInput, match=field):
        await played.replica.generate(stamp, **sampling)
    await played.assert_exact(stamp)


async def test_the_lowest_temperature_is_sampled(played: PlayedTrainer):
    stamp = await publish(played, 106)
    (answer,) = await played.replica.generate(stamp, [PROMPTS[0]], temperature=0.01)
    assert answer.completions


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}])
async def test_truncation_to_one_token_is_greedy(played: PlayedTrainer, truncation: dict[str, float]):
    stamp = await publish(played, 108)
    sampling = {"temperature": 1.0, "max_tokens": 12}
    (greedy,) = await played.replica.generate(stamp, [PROMPTS[0]], seeds=[1], **sampling | {"temperature": 0.0})
    (free,) = await played.replica.generate(stamp, [PROMPTS[0]], seeds=range(3), **sampling)
    (cut,) = await played.replica.generate(stamp, [PROMPTS[0]], seeds=range(3), **sampling, **truncation)
    assert all(completion.tokens == greedy.completions[0].tokens for completion in cut.completions)
    assert all(completion.tokens != greedy.completions[0].tokens for completion in free.completions)
    await played.assert_exact(stamp)


async def test_a_token_outside_the_vocabulary_is_the_callers_mistake(played: PlayedTrainer):
    stamp = await publish(played, 105)
    with raises(InvalidInput, field="prompts"):
        await played.replica.generate(stamp, [[3, VOCAB + 5, 4]])
    await played.assert_exact(stamp)


async def test_the_longest_prompt_has_room_for_one_token(played: PlayedTrainer):
    stamp = await publish(played, 103)
    (answer,) = await played.replica.generate(stamp, [[3] * (MAX_MODEL_LEN - 1)], max_tokens=9)
    assert len(answer.completions[0].tokens) == 1


async def test_more_prompts_than_one_batch_of_the_engine_has_room_for(played: PlayedTrainer):
    """Tests that no prompt is split on CPU, where a part of a prompt with a seed would end vLLM's engine."""
    stamp = await publish(played, 107)
    length = MAX_MODEL_LEN - 1
    prompts = [[2 + number] * length for number in range(2 * _BATCH_TOKENS // length)]
    answers = await played.replica.generate(stamp, prompts, max_tokens=1, temperature=1.0)
    assert len(answers) == len(prompts) and all(len(answer.completions[0].tokens) == 1 for answer in answers)


async def test_an_answer_says_how_long_the_unfinished_samples_of_others_are(played: PlayedTrainer):
    stamp = await publish(played, 109)
    request = pb.GenerateRequest(
        expected_stamp=stamp,
        prompts=[pb.Prompt(prompt_id=f"a/{length}", tokens=[3] * length, seeds=range(2)) for length in (8, 200, 400)],
        sampling=SamplingParams(temperature=1.0, max_tokens=MAX_MODEL_LEN - 1),  # a shorter prompt gets more tokens
        report_unfinished=True,
    )
    answers = [answer async for answer in played.replica.client.stream(RolloutService.Generate, request, timeout_s=600)]
    ends = [len(answer.completions[0].tokens) for answer in answers]
    assert [answer.prompt_id for answer in answers] == ["a/400", "a/200", "a/8"]
    first, second, last = (dict(answer.unfinished) for answer in answers)
    assert last == {} and [*second] == ["a/8"] and sorted(first) == ["a/200", "a/8"]
    # The engine may have begun with others some steps later or earlier.
    assert all(ends[0] - 4 <= length <= ends[1] for length in first.values())
    assert ends[1] - 4 <= second["a/8"] <= ends[2]


async def test_canceling_a_call_aborts_it_in_the_engine(played: PlayedTrainer):
    stamp = await publish(played, 104)
    engine = engine_of(played.replica.pid)
    request = pb.GenerateRequest(
        expected_stamp=stamp,
        prompts=[pb.Prompt(prompt_id=str(i), tokens=[3 + i], seeds=range(8)) for i in range(30)],
        sampling=SamplingParams(temperature=1.0, max_tokens=MAX_MODEL_LEN - 1),  # half a minute of work
    )

    async def consume() -> None:
        async with contextlib.aclosing(
            played.replica.client.stream(RolloutService.Generate, request, timeout_s=1200)
        ) as answers:
            async for _ in answers:
                raise AssertionError("a group finished before the call was canceled")

    call = asyncio.create_task(consume())
    await played.replica.until_sampling()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    used_before = cpu_seconds(engine)
    async with asyncio.timeout(PATIENCE_S):
        while (await played.replica.info()).samples_in_flight:
            await asyncio.sleep(0.05)
    assert cpu_seconds(engine) - used_before < 5  # seconds of the half minute
    await played.assert_exact(stamp)
    # The service has not only forgotten the samples: the engine's process is idle.
    used_before = cpu_seconds(engine)
    await asyncio.sleep(1)
    assert cpu_seconds(engine) - used_before < 0.3


async def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(
    played: PlayedTrainer, model: Callable[[str], Path]
):
    stamp = await publish(played, 107)
    decode = tokenizers.Tokenizer.from_file(str(model("untied") / "tokenizer.json")).decode
    sampling = {"max_tokens": 40, "temperature": 1.0}
    (whole,) = await played.replica.generate(stamp, [PROMPTS[0]], seeds=range(6), **sampling)
    texts = [decode(list(completion.tokens)) for completion in whole.completions]
    stops = [texts[0][5:7], texts[1][9:12], "not there"]
    (stopped,) = await played.replica.generate(stamp, [PROMPTS[0]], seeds=range(6), **sampling, stop=stops)
    num_stopped = 0
    for text, was, now in zip(texts, whole.completions, stopped.completions, strict=True):
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        num_before_stop = len(was.tokens)
        if ends:
            num_stopped += 1
            with_text = [place for place, token in enumerate(was.tokens) if token not in NO_TOKENS]
            num_before_stop = with_text[min(ends) - 1] + 1
        assert list(now.tokens) == list(was.tokens)[:num_before_stop]
        assert list(now.logprobs) == pytest.approx(list(was.logprobs)[:num_before_stop], abs=1e-5)
        assert now.finish_reason == (FINISH_REASON_STOP if ends else FINISH_REASON_LENGTH)
    assert num_stopped >= 2
    await played.assert_exact(stamp)


async def test_the_answer_says_which_prompt_the_engine_saw(played: PlayedTrainer):
    stamp = await publish(played, 108)
    prompt = [3 + index % 40 for index in range(200)]
    (first,) = await played.replica.generate(stamp, [prompt])
    assert (first.prompt_num_tokens, first.prompt_sha256) == (200, tokens_sha256(prompt))
    assert first.num_cached_tokens == 0
    (later,) = await played.replica.generate(stamp, [[*prompt, *first.completions[0].tokens]], seeds=(1, 2))
    assert later.prompt_num_tokens == 224
    assert 2 * 128 <= later.num_cached_tokens <= 2 * 224  # whole blocks, for both samples
