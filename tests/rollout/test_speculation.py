"""Tests that speculative decoding changes neither greedy samples nor distribution and log-probabilities of others.

The prompt ends with what the model repeats at a low temperature, so some drafts are accepted and some are not.
"""

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from lockstep.rollout.v1.rollout_pb2 import GenerateResponse
from lockstep.types.v1.types_pb2 import Completion, PolicyStamp

from services.common.errors import InternalError
from tests.rollout.eagle_head import make_head
from tests.rollout.rollout_stack import MAX_MODEL_LEN, PlayedTrainer, greedy_by_transformers

TEMPERATURE, NUM_TOKENS, NUM_SAMPLES = 0.25, 9, 400
NUM_BINS = 32
# Correct samples have a smaller p-value for one of 10^5 choices of seeds; these seeds are fixed. Without the correction
# of compat/patches.py the statistic is NaN, and for another temperature the p-value is far smaller.
LEAST_P = 1e-5
TOLERANCE = 2e-5
"""Largest difference of log-probabilities in float32. Without speculation it is as large."""
NGRAM = {"kind": "ngram", "num_tokens": 3, "min_match": 1, "max_match": 2}
SUFFIX = {"kind": "suffix", "num_tokens": 3}
can_draft_suffixes = pytest.mark.skipif(
    find_spec("arctic_inference") is None, reason="`make test` installs arctic-inference where it can be compiled"
)
# Drafts from cached samples, which have a test of their own, are made by the same code as those of suffixes.
KINDS = [
    pytest.param(NGRAM, id="ngram"),
    pytest.param(SUFFIX, id="suffix", marks=[can_draft_suffixes, pytest.mark.long]),
]


def logits_of(model: torch.nn.Module, prompt: Sequence[int], samples: Sequence[Completion]) -> torch.Tensor:
    """Returns the logits [S, T, V] of `model` for each token of `samples`."""
    tokens_ST = torch.tensor([[*prompt, *sample.tokens] for sample in samples])
    with torch.no_grad():
        return model(tokens_ST).logits[:, len(prompt) - 1 : -1].double()


def p_value(tokens_ST: torch.Tensor, logprobs_STV: torch.Tensor, seed: int = 0) -> float:
    """Returns the p-value of Pearson's chi-square test that `tokens_ST` were drawn from `logprobs_STV`.

    Each token becomes a random point of its part of the cumulative distribution, which is divided among the tokens from
    the most probable on. If the tokens were drawn from the distributions, these points are uniform in [0, 1) and
    independent of each other (Rosenblatt 1952), so each of the bins has the same expected count.
    """
    order_STV = logprobs_STV.argsort(-1, descending=True)
    ends_STV = logprobs_STV.gather(-1, order_STV).exp().cumsum(-1)
    ranks_ST1 = (order_STV == tokens_ST[..., None]).int().argmax(-1, keepdim=True)
    mass_ST = logprobs_STV.gather(-1, tokens_ST[..., None])[..., 0].exp()
    inside_ST = torch.rand(tokens_ST.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    points_ST = ends_STV.gather(-1, ranks_ST1)[..., 0] - mass_ST * inside_ST
    counts = torch.histc(points_ST, NUM_BINS, 0, 1)
    expected = tokens_ST.numel() / NUM_BINS
    assert expected > 5  # Cochran's rule
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((NUM_BINS - 1) / 2, dtype=torch.float64), statistic / 2))


async def open_run(played: PlayedTrainer, model: Callable[[str], Path], speculation: dict[str, object]) -> None:
    """Opens a run that drafts, in place of the last one. The replica's next user opens another run there."""
    run_id = f"speculating-{speculation['kind']}"
    await played.replica.open(model("untied"), run_id, max_model_len=MAX_MODEL_LEN, speculation=speculation)


async def draw(
    speculating: PlayedTrainer, stamp: PolicyStamp, seeds: Sequence[int]
) -> tuple[list[int], GenerateResponse]:
    """Returns a prompt and its samples."""
    prompt = [5, 9, *greedy_by_transformers(speculating.model, 24, [[5, 9]])[0]]
    sampling = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS}
    (answer,) = await speculating.replica.generate(stamp, [prompt], seeds=seeds, **sampling)
    return prompt, answer


async def assert_kept(speculating: PlayedTrainer, stamp: PolicyStamp) -> GenerateResponse:
    """Asserts that tokens, distribution and log-probabilities are right; returns the samples that were compared."""
    await speculating.assert_exact(stamp)  # greedy samples are equal to the token
    prompt, answer = await draw(speculating, stamp, range(NUM_SAMPLES))
    samples = answer.completions
    tokens_ST = torch.tensor([sample.tokens for sample in samples])
    logits_STV = logits_of(speculating.model, prompt, samples)
    expected_STV = (logits_STV / TEMPERATURE).log_softmax(-1)
    expected_ST = expected_STV.gather(-1, tokens_ST[..., None])[..., 0]
    reported_ST = torch.tensor([sample.logprobs for sample in samples], dtype=torch.float64)
    assert (reported_ST - expected_ST).abs().max() < TOLERANCE
    for place in range(1, NUM_TOKENS, 2):  # the first token is never drafted
        pair = slice(place, place + 2)
        assert p_value(tokens_ST[:, pair], expected_STV[:, pair]) > LEAST_P
    assert p_value(tokens_ST, expected_STV) > LEAST_P
    assert p_value(tokens_ST, (logits_STV / (1.25 * TEMPERATURE)).log_softmax(-1)) < LEAST_P  # a wrong one is noticed
    return answer


async def assert_independent(speculating: PlayedTrainer, stamp: PolicyStamp, answer: GenerateResponse) -> None:
    """Asserts that a sample depends on its seed, not on others that are drafted and verified in the same step."""
    _, again = await draw(speculating, stamp, [7])
    (alone,) = again.completions
    assert alone.tokens == answer.completions[7].tokens
    assert list(alone.logprobs) == pytest.approx(list(answer.completions[7].logprobs), abs=TOLERANCE)


async def test_logprobs_that_are_not_finite_are_refused(
    played_trainer: PlayedTrainer, model: Callable[[str], Path]
) -> None:
    await open_run(played_trainer, model, NGRAM)  # which the next test keeps
    played_trainer.draw(seed=202)
    with torch.no_grad():
        dict(played_trainer.weights())["lm_head.weight"].fill_(math.nan)
    stamp = await played_trainer.publish(202)
    with pytest.raises(InternalError, match="not finite"):
        await played_trainer.replica.generate(stamp, temperature=1.0)


@pytest.mark.parametrize("speculation", KINDS)
async def test_samples_keep_their_distribution_and_logprobs(
    played_trainer: PlayedTrainer, model: Callable[[str], Path], speculation: dict[str, object]
) -> None:
    await open_run(played_trainer, model, speculation)
    played_trainer.draw(seed=201)
    stamp = await played_trainer.publish(201)
    answer = await assert_kept(played_trainer, stamp)
    await assert_independent(played_trainer, stamp, answer)
    drafts = answer.drafts
    assert NUM_SAMPLES / 2 < drafts.num_accepted < drafts.num_drafted - NUM_SAMPLES
    assert drafts.num_drafts < NUM_SAMPLES * (NUM_TOKENS - 1) and drafts.seconds > 0


@can_draft_suffixes
async def test_cached_samples_of_these_and_other_weights_are_verified(
    played_trainer: PlayedTrainer, model: Callable[[str], Path]
) -> None:
    await open_run(played_trainer, model, SUFFIX | {"cached_samples": 2 * NUM_SAMPLES})
    played_trainer.draw(seed=203)
    stamp = await played_trainer.publish(203)
    greedy = [await played_trainer.replica.generate(stamp) for _ in range(2)]
    first, again = (sum(answer.drafts.num_accepted for answer in answers) for answers in greedy)
    assert again > first  # the same tokens, which are now cached
    _, drawn = await draw(played_trainer, stamp, range(NUM_SAMPLES))
    redrawn = await assert_kept(played_trainer, stamp)  # with the same seeds, and therefore other drafts
    assert sum(a.tokens != b.tokens for a, b in zip(drawn.completions, redrawn.completions, strict=True)) > 1
    played_trainer.draw(seed=204)
    assert (await assert_kept(played_trainer, await played_trainer.publish(204))).drafts.num_accepted


@pytest.mark.long
async def test_a_head_drafts_for_weights_that_are_published(
    played_trainer: PlayedTrainer, model: Callable[[str], Path], tmp_path: Path
) -> None:
    played_trainer.draw(seed=201)
    head = make_head(tmp_path / "head", played_trainer.model)
    await open_run(played_trainer, model, {"kind": "eagle3", "num_tokens": 3, "draft": str(head)})
    stamp = await played_trainer.publish(201)
    answer = await assert_kept(played_trainer, stamp)
    await assert_independent(played_trainer, stamp, answer)
    drafts = answer.drafts
    assert NUM_SAMPLES / 20 < drafts.num_accepted < drafts.num_drafted - NUM_SAMPLES
