"""Tests that a real engine returns the tokens allowed for each sampled token, and log-probabilities over them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import SamplingParams, TokenSequence

from services.common.batches import decode_sampling_masks
from services.common.errors import InvalidInput
from services.common.routed_experts import from_parts
from services.rollout.sampling import engine_sampling
from tests.rollout.rollout_stack import PROMPTS, PlayedTrainer
from tests.support import raises

TEMPERATURE, NUM_TOKENS, NUM_SAMPLES = 0.4, 40, 10  # vLLM sends 32 tokens at a time
# Both compute in float32, as in test_speculation.py.
TOLERANCE = 2e-5


def allowed_by_definition(logits_TV: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Returns which tokens stay, bool [T, V]: vLLM applies min-p, then top-k, then top-p to what is left."""
    probs_TV = (logits_TV / TEMPERATURE).softmax(-1)
    is_allowed_TV = probs_TV >= min_p * probs_TV.amax(-1, keepdim=True)
    is_allowed_TV &= probs_TV >= probs_TV.topk(top_k).values[:, -1:]
    probs_TV = torch.where(is_allowed_TV, probs_TV, 0)
    sorted_TV, order_TV = (probs_TV / probs_TV.sum(-1, keepdim=True)).sort(-1, descending=True)
    is_inside_TV = sorted_TV.cumsum(-1) - sorted_TV < top_p  # the mass of all more probable tokens
    return is_allowed_TV & is_inside_TV.gather(-1, order_TV.argsort(-1))


def masks_of(answer: pb.GenerateResponse) -> list[list[np.ndarray]]:
    rows = zip(from_parts(answer.sampling_mask, NUM_SAMPLES), answer.completions, strict=True)
    decoded = [decode_sampling_masks(data, len(completion.tokens)) for data, completion in rows]
    return [np.split(allowed, counts.cumsum()[:-1]) for counts, allowed in decoded]


def over_allowed(logits_V: torch.Tensor, allowed: np.ndarray) -> dict[int, float]:
    """Returns the log-probability of each token of `sampling_mask` [K], if only these can be sampled."""
    logprobs = (logits_V.double()[torch.from_numpy(allowed.astype(np.int64))] / TEMPERATURE).log_softmax(-1)
    return dict(zip(allowed.tolist(), logprobs.tolist(), strict=True))


async def test_sampling_masks_are_those_of_the_definition_and_logprobs_are_over_them(played: PlayedTrainer) -> None:
    played.draw(seed=110)
    stamp = await played.publish(110)
    prompt, truncation = PROMPTS[3], {"top_k": 12, "top_p": 0.85, "min_p": 0.08}
    sampling = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, **truncation}
    (answer,) = await played.replica.generate(
        stamp, [prompt], seeds=range(NUM_SAMPLES), **sampling, return_sampling_mask=True
    )
    num_allowed, narrowed = [], dict.fromkeys(truncation, 0)
    for completion, sets in zip(answer.completions, masks_of(answer), strict=True):
        with torch.no_grad():
            logits_TV = played.model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        is_allowed_TV = allowed_by_definition(logits_TV.double(), **truncation)
        assert [allowed.tolist() for allowed in sets] == [row.nonzero()[:, 0].tolist() for row in is_allowed_TV]
        for name, off in (("top_k", len(logits_TV[0])), ("top_p", 1.0), ("min_p", 0.0)):
            wider_TV = allowed_by_definition(logits_TV.double(), **truncation | {name: off})
            narrowed[name] += int((wider_TV.sum(-1) > is_allowed_TV.sum(-1)).sum())
        for token, logprob, allowed, logits_V in zip(
            completion.tokens, completion.logprobs, sets, logits_TV, strict=True
        ):
            assert token in allowed
            assert abs(over_allowed(logits_V, allowed)[token] - logprob) < TOLERANCE
            num_allowed.append(len(allowed))
    assert len(num_allowed) == NUM_TOKENS * NUM_SAMPLES and len(set(num_allowed)) > 5, num_allowed
    assert min(narrowed.values()) > 10, narrowed  # each of the three removes tokens of its own


async def test_sampling_masks_have_no_stop_token_where_none_could_be_sampled(played: PlayedTrainer) -> None:
    played.draw(seed=113)
    stamp = await played.publish(113)
    prompt, stops, least = PROMPTS[3], list(range(2, 20)), 8
    sampling: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS, "top_k": 12}
    sampling |= {"stop_token_ids": stops, "min_tokens": least, "return_sampling_mask": True}
    (answer,) = await played.replica.generate(stamp, [prompt], seeds=range(NUM_SAMPLES), **sampling)
    assert {len(completion.tokens) for completion in answer.completions} != {NUM_TOKENS}
    for completion, sets in zip(answer.completions, masks_of(answer), strict=True):
        assert len(completion.tokens) > least
        with torch.no_grad():
            logits_TV = played.model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        for at, (token, logprob, allowed) in enumerate(zip(completion.tokens, completion.logprobs, sets, strict=True)):
            assert at >= least or not set(allowed.tolist()) & set(stops)
            assert abs(over_allowed(logits_TV[at], allowed)[token] - logprob) < TOLERANCE


async def test_sampling_masks_have_no_token_that_would_complete_a_bad_word(played: PlayedTrainer) -> None:
    played.draw(seed=114)
    stamp = await played.publish(114)
    prompt = PROMPTS[3]
    sampling: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "max_tokens": NUM_TOKENS,
        "top_k": 12,
        "return_sampling_mask": True,
    }
    (free,) = await played.replica.generate(stamp, [prompt], seeds=range(NUM_SAMPLES), **sampling)
    said = [list(completion.tokens) for completion in free.completions]
    runs = [Counter(tuple(s[i : i + n]) for s in said for i in range(NUM_TOKENS + 1 - n)) for n in (1, 2, 3)]
    words = [runs[0].most_common(1)[0][0]]
    for longer in runs[1:]:  # without the tokens of the words before, so that they can be begun
        words.append(next(w for w, _ in longer.most_common() if not {t for word in words for t in word} & {*w}))
    sampling |= {"bad_words": [TokenSequence(tokens=word) for word in words]}
    (answer,) = await played.replica.generate(stamp, [prompt], seeds=range(NUM_SAMPLES), **sampling)
    begun = Counter()
    for completion, sets in zip(answer.completions, masks_of(answer), strict=True):
        with torch.no_grad():
            logits_TV = played.model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        for at, (token, logprob, allowed) in enumerate(zip(completion.tokens, completion.logprobs, sets, strict=True)):
            said_before = tuple(completion.tokens[:at])
            masked = [word for word in words if said_before[at + 1 - len(word) :] == word[:-1]]
            begun.update(masked)
            allowed_V = logits_TV[at].clone()
            allowed_V[[word[-1] for word in masked]] = -torch.inf
            assert len(allowed) == 12 and allowed_V[allowed.tolist()].min() > allowed_V.topk(12).values[-1] - TOLERANCE
            assert abs(over_allowed(logits_TV[at], allowed)[token] - logprob) < TOLERANCE
    assert set(begun) == set(words), begun  # each was begun, and so could have been sampled
    for wrong, field in (([60000], "sampling.bad_words"), ([], "sampling")):
        sampling["bad_words"] = [TokenSequence(tokens=wrong)]
        with raises(InvalidInput, field=field):
            await played.replica.generate(stamp, [prompt], **sampling)


async def test_only_a_request_that_asks_gets_sampling_masks(played: PlayedTrainer) -> None:
    played.draw(seed=111)
    stamp = await played.publish(111)
    (answer,) = await played.replica.generate(stamp, [PROMPTS[0]], temperature=1.0, top_k=3)
    assert answer.completions and not answer.sampling_mask
    await played.assert_exact(stamp)  # greedy requests are answered as before


@pytest.mark.parametrize("sampling", [{"top_k": 0}, {"top_k": 1025}, {"temperature": 0.0}, {"stop": ["x"]}])
async def test_masks_that_could_not_come_are_refused(played: PlayedTrainer, sampling: dict[str, object]) -> None:
    played.draw(seed=112)
    stamp = await played.publish(112)
    with pytest.raises(InvalidInput, match="return_sampling_mask: needs"):
        await played.replica.generate(
            stamp, **{"temperature": 1.0, "top_k": 5, "return_sampling_mask": True} | sampling
        )


def test_more_stop_tokens_than_the_engine_takes_are_refused_before_they_end_it() -> None:
    stops = list(range(129))
    engine_sampling(SamplingParams(max_tokens=2, stop_token_ids=stops), seed=0)
    engine_sampling(SamplingParams(max_tokens=2, stop_token_ids=stops[1:], min_tokens=1), seed=0)
    with pytest.raises(ValueError, match="min_tokens: needs at most 128 stop_token_ids"):
        engine_sampling(SamplingParams(max_tokens=2, stop_token_ids=stops, min_tokens=1), seed=0)
