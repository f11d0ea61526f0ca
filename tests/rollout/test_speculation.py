"""Tests that speculative decoding changes neither tokens nor their distribution and log-probabilities.

The prompt ends with what the model repeats at a low temperature, so some drafts are accepted and some are not.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from lockstep.rollout.v1.rollout_pb2 import Drafts
from lockstep.types.v1.types_pb2 import Completion, PolicyStamp

from services.common.errors import InternalError
from tests.rollout.eagle_head import make_head
from tests.rollout.rollout_stack import MAX_MODEL_LEN, PlayedTrainer, greedy_by_transformers

TEMPERATURE, NUM_TOKENS, NUM_SAMPLES = 0.25, 9, 400
NUM_BINS = 32
# Correct samples have a smaller p-value for one of 10^5 choices of seeds; these seeds are fixed. Without the correction
# of compat/vllm/temperatures.py the statistic is NaN, and for another temperature the p-value is far smaller.
LEAST_P = 1e-5
TOLERANCE = 2e-5
"""Largest difference of log-probabilities in float32. Without speculation it is as large."""


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


@pytest.fixture
async def speculating(played_trainer: PlayedTrainer, model: Callable[[str], Path]) -> PlayedTrainer:
    """Provides a trainer that the test plays, for a replica that drafts with n-grams.

    The replica's next user opens another run there.
    """
    await open_run(played_trainer, model, {"kind": "ngram", "num_tokens": 3, "min_match": 1, "max_match": 2})
    return played_trainer


async def open_run(played: PlayedTrainer, model: Callable[[str], Path], speculation: dict[str, object]) -> None:
    run_id = f"speculating-{speculation['kind']}"
    await played.replica.open(model("untied"), run_id, max_model_len=MAX_MODEL_LEN, speculation=speculation)


async def assert_kept(speculating: PlayedTrainer, stamp: PolicyStamp) -> Drafts:
    """Asserts that tokens, distribution and log-probabilities are right; returns what was drafted for the samples."""
    await speculating.assert_exact(stamp)  # greedy samples are equal to the token
    prompt = [5, 9, *greedy_by_transformers(speculating.model, 24, [[5, 9]])[0]]
    sampling = {"temperature": TEMPERATURE, "max_tokens": NUM_TOKENS}
    (answer,) = await speculating.replica.generate(stamp, [prompt], seeds=range(NUM_SAMPLES), **sampling)
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
    # A sample depends on its seed, not on the others that are drafted and verified in the same step.
    (again,) = await speculating.replica.generate(stamp, [prompt], seeds=[7], **sampling)
    (alone,) = again.completions
    assert alone.tokens == samples[7].tokens
    assert list(alone.logprobs) == pytest.approx(list(samples[7].logprobs), abs=TOLERANCE)
    return answer.drafts


async def test_samples_keep_their_distribution_and_logprobs(speculating: PlayedTrainer) -> None:
    speculating.draw(seed=201)
    drafts = await assert_kept(speculating, await speculating.publish(201))
    assert NUM_SAMPLES / 2 < drafts.num_accepted < drafts.num_drafted - NUM_SAMPLES
    assert drafts.num_drafts < NUM_SAMPLES * (NUM_TOKENS - 1) and drafts.seconds > 0


@pytest.mark.long
async def test_a_head_drafts_for_weights_that_are_published(
    played_trainer: PlayedTrainer, model: Callable[[str], Path], tmp_path: Path
) -> None:
    played_trainer.draw(seed=201)
    head = make_head(tmp_path / "head", played_trainer.model)
    await open_run(played_trainer, model, {"kind": "eagle3", "num_tokens": 3, "draft": str(head)})
    drafts = await assert_kept(played_trainer, await played_trainer.publish(201))
    assert NUM_SAMPLES / 20 < drafts.num_accepted < drafts.num_drafted - NUM_SAMPLES


async def test_logprobs_that_are_not_finite_are_refused(speculating: PlayedTrainer) -> None:
    speculating.draw(seed=202)
    with torch.no_grad():
        dict(speculating.weights())["lm_head.weight"].fill_(math.nan)
    stamp = await speculating.publish(202)
    with pytest.raises(InternalError, match="not finite"):
        await speculating.replica.generate(stamp, temperature=1.0)
