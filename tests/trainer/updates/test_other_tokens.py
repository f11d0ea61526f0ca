"""Tests log-probabilities of other tokens than the target, of all tokens beside them, and of the most probable ones."""

import math

import pytest
import torch

from services.trainer.updates.logprobs import Targets, linear_logprobs
from services.trainer.updates.softmax import TopK
from tests.trainer.updates.logits import (
    TOP_K,
    V,
    inputs,
    mixed,
    others,
    plain,
    plain_with_others,
    rest,
    sampling_masks,
    without_padding,
)


@pytest.mark.usefixtures("chunked")
def test_values_and_gradients_of_other_tokens_are_autograds() -> None:
    hidden, weight, targets = inputs()
    others_MJ = others(targets)
    got = linear_logprobs(hidden, weight, Targets(targets, others_MJ=others_MJ.int()), 0.7)
    got, want = without_padding(got, others_MJ), plain_with_others(hidden, weight, targets, others_MJ)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(mixed(values), (hidden, weight)) for values in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


def test_other_tokens_of_a_capped_and_masked_model_have_the_gradients_of_finite_differences() -> None:
    hidden, weight, targets = inputs()
    mask_MK = sampling_masks(targets)
    also = Targets(targets, mask_MK, others_MJ=mask_MK[:, :2].clone())
    also.others_MJ[2] = -1  # because a mask may have a token twice, and others may not

    def computed(hidden_MD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        values_RM = without_padding(linear_logprobs(hidden_MD, weight_VD, also, 0.7, softcap=3.0), also.others_MJ)
        # Where the mask has no token beside the others, their probability is 0, and no loss has a gradient.
        return torch.where(values_RM > -1e20, values_RM, 0)

    assert torch.autograd.gradcheck(computed, (hidden, weight))


@pytest.mark.usefixtures("chunked")
def test_the_most_probable_tokens_are_those_of_log_softmax() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        got = linear_logprobs(hidden, weight, Targets(targets, top_k=TopK(TOP_K, V)), 0.7)
        scores_MV = torch.log_softmax(hidden @ weight.T / 0.7, -1)
        values, tokens = scores_MV.topk(TOP_K)
        want = torch.cat([plain(hidden, weight, targets, 0.7), values.T, rest(scores_MV, tokens), tokens.T])
        torch.testing.assert_close(got, want)
        # Of another model's smaller vocabulary; the others count as the rest.
        got = linear_logprobs(hidden, weight, Targets(targets, top_k=TopK(TOP_K, V - 5)), 0.7)
        values, tokens = scores_MV[:, : V - 5].topk(TOP_K)
        want = torch.cat([plain(hidden, weight, targets, 0.7), values.T, rest(scores_MV, tokens), tokens.T])
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [1.0, 40.0, 120.0])
def test_all_other_tokens_together_are_exact_where_they_are_unlikely(size: float) -> None:
    """Compares a rest of 1e-12, and its gradient, which a difference from 1 would lose, and logits of another size."""
    weight = torch.eye(4).requires_grad_()
    hidden = (torch.tensor([[27.0, 0.0, 1.0, 2.0]]) + size).requires_grad_()
    exact = (hidden.detach().double()).requires_grad_()
    targets = Targets(torch.tensor([3]), others_MJ=torch.tensor([[0]]))
    got = linear_logprobs(hidden, weight, targets, 1.0)[2:]
    scores = torch.log_softmax(exact, -1)[0]
    want = torch.stack([scores[:1], scores[1:].logsumexp(0, keepdim=True)])
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
    (found,) = torch.autograd.grad(got[1].sum(), hidden)
    torch.testing.assert_close(found.double(), torch.autograd.grad(want[1].sum(), exact)[0], rtol=1e-5, atol=1e-7)


def test_a_likely_token_has_a_gradient_that_bfloat16_does_not_lose() -> None:
    """Descends (log p - log q)^2 / 2 of one token, p = 0.997 and q = 0.9. Its logit's gradient is 2.8e-4, of 0.1."""
    weight = torch.eye(4, dtype=torch.bfloat16).requires_grad_()
    hidden = torch.tensor([[7.0, 0, 0, 0]], dtype=torch.bfloat16, requires_grad=True)
    targets = Targets(torch.tensor([0]), others_MJ=torch.tensor([[0]]))
    logprob = linear_logprobs(hidden, weight, targets, 1.0)[2]
    ((logprob - math.log(0.9)) ** 2 / 2).sum().backward()
    exact = torch.tensor([7.0, 0, 0, 0], dtype=torch.float64).log_softmax(0)[0]
    want = (exact - math.log(0.9)) * -torch.expm1(exact)
    # One rounding of 2^-9. The two parts of size 0.1 have roundings that alone are as large as their difference.
    assert float(hidden.grad[0, 0]) == pytest.approx(float(want), rel=2**-8)
