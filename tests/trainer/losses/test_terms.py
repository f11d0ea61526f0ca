"""Tests the terms of losses, and learning rates, against plain arithmetic."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.loss import Aggregation, LossConfig, LossKind
from services.common.config.optim import OptimConfig
from services.trainer.losses.kinds import Tokens, clipped_surrogate, token_weights
from services.trainer.losses.policy import KL_ESTIMATES, LOSSES, Totals, distill_loss, kl_k3
from services.trainer.updates.optim import learning_rate

LOGPROBS = st.floats(-20, 0)
# There are three sequences of 3, 1 and 4 tokens, of which 2, 0 and 4 are trained on.
MASK_N = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1])
COLUMNS = {"loss_mask": MASK_N, "completion_length": torch.tensor([2.0, 2, 2, 0, 4, 4, 4, 4])}
TOTALS = Totals(num_tokens=6, num_sequences=2)
WEIGHTS = {
    "token_mean": ([1 / 6, 0, 1 / 6], [0], [1 / 6] * 4),
    "seq_mean_token_mean": ([1 / 4, 0, 1 / 4], [0], [1 / 8] * 4),
    "seq_mean_token_sum": ([1 / 2, 0, 1 / 2], [0], [1 / 2] * 4),
    "seq_mean_token_sum_norm": ([1 / 20, 0, 1 / 20], [0], [1 / 20] * 4),
}


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_weights(aggregation: Aggregation) -> None:
    config = LossConfig(aggregation=aggregation, norm_tokens=10 if aggregation == "seq_mean_token_sum_norm" else None)
    weights, (first, second, third) = token_weights(config, COLUMNS, TOTALS), WEIGHTS[aggregation]
    assert weights.tolist() == pytest.approx([*first, *second, *third], rel=1e-7)


def test_sums_over_sequences_leave_out_masked_tokens() -> None:
    tokens = Tokens(torch.zeros(8), COLUMNS, (3, 1, 4))
    values_N = torch.tensor([1.0, 100, 2, 100, 1, 2, 3, 4], requires_grad=True)
    assert tokens.sequence_sum(values_N).tolist() == [3, 3, 3, 0, 10, 10, 10, 10]
    assert tokens.sequence_mean(values_N).tolist() == [1.5, 1.5, 1.5, 0, 2.5, 2.5, 2.5, 2.5]
    assert not tokens.sequence_mean(values_N).requires_grad


def test_masked_tokens_have_ratio_one_whatever_they_are() -> None:
    logprobs_N, others_N = torch.full((8,), -1.0), torch.where(MASK_N > 0, -2.0, -1e4)
    columns = COLUMNS | dict.fromkeys(("old_logprobs", "behavior_logprobs", "ref_logprobs"), others_N)
    tokens = Tokens.of(logprobs_N, columns, (3, 1, 4))
    assert torch.equal(tokens.log_ratio_N, MASK_N)
    assert torch.equal(logprobs_N - tokens.columns["behavior_logprobs"], MASK_N)
    assert torch.equal(logprobs_N - tokens.columns["ref_logprobs"], MASK_N)


@settings(max_examples=300, deadline=None)
@given(logprob=LOGPROBS, reference=LOGPROBS)
def test_divergence_is_never_negative(logprob: float, reference: float) -> None:
    for dtype in (torch.float32, torch.float64):
        value = float(kl_k3(torch.tensor(logprob, dtype=dtype), torch.tensor(reference, dtype=dtype)))
        # expm1(x) - x is rounded once, so it is below zero by no more than the rounding of x.
        assert value >= -abs(logprob - reference) * torch.finfo(dtype).eps
        assert (value == 0) or logprob != reference


def test_divergence_of_equals_is_zero_with_no_gradient() -> None:
    logprobs = torch.tensor([-3.7, -0.1], requires_grad=True)
    divergence = kl_k3(logprobs, logprobs.detach())
    assert divergence.tolist() == [0.0, 0.0]
    divergence.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def _means_over_a_vocabulary(kind: str) -> tuple[float, float, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the exact mean of an estimate, KL(policy || reference), and three gradients.

    The gradients are those of the mean, of KL(policy || reference) and of KL(reference || policy).
    """
    torch.manual_seed(0)
    logits, reference = torch.randn(2, 9, dtype=torch.float64)
    logits, reference = logits.requires_grad_(), reference.log_softmax(0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    policy = logits.log_softmax(0)
    mean = (policy.exp().detach() * KL_ESTIMATES[kind](policy, reference)).sum()  # samples are not differentiated
    reverse, forward = (policy.exp() * (policy - reference)).sum(), (reference.exp() * (reference - policy)).sum()
    return mean.item(), reverse.item(), gradient(mean), gradient(reverse), gradient(forward)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_divergence_is_an_estimate_of_kl(kind: str) -> None:
    mean, exact, *_ = _means_over_a_vocabulary(kind)
    assert mean == pytest.approx(exact, rel=1e-12)


def test_gradients_of_divergences_are_those_that_the_config_says() -> None:
    _, _, k1, reverse, forward = _means_over_a_vocabulary("k1")
    assert k1.abs().max() < 1e-15
    torch.testing.assert_close(_means_over_a_vocabulary("k2")[2], reverse, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(_means_over_a_vocabulary("k3")[2], forward, rtol=1e-12, atol=1e-15)
    assert (reverse - forward).abs().max() > 0.01


def test_absolute_divergence_pulls_with_the_sign() -> None:
    logprobs = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    divergence = KL_ESTIMATES["abs"](logprobs, torch.full((3,), -2.0))
    divergence.sum().backward()
    assert (divergence.tolist(), logprobs.grad.tolist()) == ([1, 1, 0], [1, -1, 0])


def distilled(kl: str, policy: list[float], teacher: list[float], tokens: list[int]) -> tuple[float, list[float]]:
    """Returns the divergence at one token, and its gradient to the logits that the policy's events are made of."""
    logits_K = torch.tensor(policy, dtype=torch.float64).log().nan_to_num(neginf=-1e30).requires_grad_()
    config = LossConfig.model_validate({"distill": {"coef": 1, "kl": kl}})
    columns = {"loss_mask": torch.ones(1), "completion_length": torch.ones(1)}
    of_teacher = torch.tensor([tokens]), torch.tensor([teacher]).log().nan_to_num(neginf=-1e30)
    loss, mean = distill_loss(logits_K.log_softmax(0)[:, None], of_teacher, columns, Totals(1, 1), config)
    assert float(mean) == loss.item()
    loss.backward()
    return loss.item(), logits_K.grad.tolist()


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_divergence_from_a_teacher_has_the_gradient_of_the_whole(kl: str) -> None:
    policy, teacher = [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]
    p, q = (policy, teacher) if kl == "reverse" else (teacher, policy)
    want = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    value, gradient = distilled(kl, policy, teacher, [3, 1])
    assert value == pytest.approx(want, rel=1e-6)
    logs = [math.log(a / b) for a, b in zip(policy, teacher, strict=True)]
    reverse = [a * (log - want) for a, log in zip(policy, logs, strict=True)]
    forward = [a - b for a, b in zip(policy, teacher, strict=True)]
    assert gradient == pytest.approx(reverse if kl == "reverse" else forward, rel=1e-5)
    assert distilled(kl, policy, policy, [3, 1])[0] == pytest.approx(0, abs=1e-7)


def test_a_confident_policy_still_learns_what_its_teacher_would_also_say() -> None:
    _, gradient = distilled("forward", [1 - 1e-9, 1e-9], [0.667, 0.333], [0])
    assert gradient == pytest.approx([0.333, -0.333], rel=1e-5)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize(
    ("policy", "teacher"), [([0.5, 0.5, 0.0], [0.4, 0.5, 0.1]), ([0.5, 0.4, 0.1], [0.5, 0.5, 0.0])]
)
def test_what_one_of_them_cannot_sample_does_not_count(kl: str, policy: list[float], teacher: list[float]) -> None:
    value, gradient = distilled(kl, policy, teacher, [0, 1])
    assert abs(value) < 1 and all(math.isfinite(one) for one in gradient)


def test_padding_is_no_event() -> None:
    value = distilled("reverse", [0.6, 0.3, 0.1], [0.5, 1.0, 0.5], [0, -1])[0]
    assert value == pytest.approx(0.6 * math.log(0.6 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-6)


# Each row: the ratio, the advantage, and whether the gradient is cut off. PPO clips only moves that go further in the
# rewarded direction.
CLIP_TABLE = [
    (1.0, 1.0, False),
    (1.0, -1.0, False),
    (1.29, 1.0, False),
    (1.31, 1.0, True),
    (1.31, -1.0, False),
    (0.91, -1.0, False),
    (0.89, -1.0, True),
    (0.89, 1.0, False),
    (5.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "clipped"), CLIP_TABLE)
def test_clip(ratio: float, advantage: float, clipped: bool) -> None:
    ratio_N = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    loss, binds = clipped_surrogate(ratio_N, torch.tensor([advantage], dtype=torch.float64), 0.1, 0.3)
    loss.sum().backward()
    assert binds.tolist() == [clipped]
    assert ratio_N.grad.tolist() == [0.0 if clipped else -advantage]
    limit = 1.3 if advantage > 0 else 0.9
    assert loss.item() == pytest.approx(-advantage * (limit if clipped else ratio), rel=1e-15)


def test_every_loss_of_the_config_is_there() -> None:
    assert set(LOSSES) == set(get_args(LossKind))
    assert set(KL_ESTIMATES) == set(get_args(LossConfig.model_fields["kl_kind"].annotation))


SCHEDULES = [
    ({}, {0: 1.0, 1: 1.0, 999: 1.0}),
    ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 50: 1.0}),
    ({"schedule": "linear", "decay_steps": 10}, {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0, 11: 0.0, 1000: 0.0}),
    (
        {"schedule": "linear", "decay_steps": 12, "warmup_steps": 2, "min_lr_ratio": 0.2},
        {0: 0.5, 1: 1.0, 2: 1.0, 7: 0.6, 12: 0.2, 13: 0.2},
    ),
    (
        {"schedule": "cosine", "decay_steps": 8, "min_lr_ratio": 0.5},
        {0: 1.0, 2: 0.75 + 0.25 * math.cos(math.pi / 4), 4: 0.75, 8: 0.5, 99: 0.5},
    ),
]


@pytest.mark.parametrize(("settings", "table"), SCHEDULES)
def test_learning_rate(settings: dict[str, object], table: dict[int, float]) -> None:
    config = OptimConfig(lr=3e-4, **settings)
    for update, ratio in table.items():
        assert learning_rate(config, update) == pytest.approx(3e-4 * ratio, rel=1e-12, abs=1e-18), update
