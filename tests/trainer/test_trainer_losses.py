"""The loss, term by term, against plain arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.loss import LossConfig
from services.common.config.trainer import OptimConfig
from services.trainer.losses import LOSSES, Totals
from services.trainer.losses.grpo import grpo
from services.trainer.losses.terms import clipped_surrogate, kl_k3, token_weights
from services.trainer.optim import learning_rate

LENGTHS = [3, 1, 4]
TOTALS = Totals(num_tokens=8, num_sequences=3, max_completion_tokens=4)
LOGPROBS = st.floats(-20, 0)


def columns(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return torch.randn(8, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([float(n) for n in LENGTHS for _ in range(n)], dtype=torch.float64)
    return {
        "old_logprobs": -2 + 0.3 * random(),
        "ref_logprobs": -2 + 0.3 * random(),
        "advantages": random(),
        "completion_length": lengths,
    }


def plain_loss(logprobs: list[float], entropy: list[float], held: dict[str, torch.Tensor], config: LossConfig) -> float:
    """One token after the other, as the papers write it."""
    values = []
    for i, logprob in enumerate(logprobs):
        ratio = math.exp(logprob - float(held["old_logprobs"][i]))
        advantage = float(held["advantages"][i])
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        off = float(held["ref_logprobs"][i]) - logprob
        values.append(
            -min(advantage * ratio, advantage * clipped)
            - config.entropy_coef * entropy[i]
            + config.kl_coef * (math.exp(off) - off - 1)
        )
    samples = [values[:3], values[3:4], values[4:]]
    if config.aggregation == "token_mean":
        return sum(values) / 8
    if config.aggregation == "seq_mean_token_mean":
        return sum(sum(sample) / len(sample) for sample in samples) / 3
    return sum(sum(sample) / 4 for sample in samples) / 3


CONFIGS = [
    LossConfig(aggregation=aggregation, kl_coef=kl, entropy_coef=entropy, clip_low=0.1, clip_high=0.3)
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
    for kl, entropy in ((0.0, 0.0), (0.2, 0.05))
]
LOGPROBS_N = torch.tensor([-2.5, -1.6, -2.0, -2.2, -1.9, -2.1, -1.4, -3.0], dtype=torch.float64)
ENTROPY_N = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.aggregation}-{c.kl_coef}")
def test_loss_is_the_plain_one(config: LossConfig) -> None:
    held = columns()
    loss, metrics = grpo(LOGPROBS_N, ENTROPY_N, held, TOTALS, config)
    want = plain_loss(LOGPROBS_N.tolist(), ENTROPY_N.tolist(), held, config)
    # float64, some 50 operations.
    assert float(loss) == pytest.approx(want, rel=1e-14, abs=1e-14)
    assert float(metrics["loss"]) == float(loss)
    assert not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.aggregation}-{c.kl_coef}")
def test_gradient_is_the_finite_difference(config: LossConfig) -> None:
    held = columns()
    logprobs, entropy = LOGPROBS_N.clone().requires_grad_(), ENTROPY_N.clone().requires_grad_()
    grpo(logprobs, entropy, held, TOTALS, config)[0].backward()
    step = 1e-6
    for values, gradient in ((LOGPROBS_N, logprobs.grad), (ENTROPY_N, entropy.grad)):
        for i in range(8):
            shifted = []
            for sign in (1, -1):
                moved = values.clone()
                moved[i] += sign * step
                pair = (moved, ENTROPY_N) if values is LOGPROBS_N else (LOGPROBS_N, moved)
                shifted.append(plain_loss(pair[0].tolist(), pair[1].tolist(), held, config))
            # Central differences: h^2 = 1e-12 of curvature, and 1e-16 / h = 1e-10 of rounding.
            assert float(gradient[i]) == pytest.approx((shifted[0] - shifted[1]) / (2 * step), abs=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.aggregation}-{c.kl_coef}")
def test_parts_add_up_to_the_whole(config: LossConfig) -> None:
    held = columns()
    whole, whole_metrics = grpo(LOGPROBS_N, ENTROPY_N, held, TOTALS, config)
    losses, metrics = [], []
    for part in (slice(0, 3), slice(3, 4), slice(4, 8)):
        cut = {name: values[part] for name, values in held.items()}
        loss, measured = grpo(LOGPROBS_N[part], ENTROPY_N[part], cut, TOTALS, config)
        losses.append(loss)
        metrics.append(measured)
    assert float(sum(losses)) == pytest.approx(float(whole), rel=1e-14)
    for name, value in whole_metrics.items():
        assert float(sum(m[name] for m in metrics)) == pytest.approx(float(value), rel=1e-14)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_weights_of_a_mean_sum_to_one(aggregation: str) -> None:
    weights = token_weights(LossConfig(aggregation=aggregation), TOTALS, columns()["completion_length"])
    assert float(weights.sum()) == pytest.approx(1, rel=1e-15)


def test_weights_of_a_fixed_length_do_not_depend_on_the_sample() -> None:
    weights = token_weights(LossConfig(aggregation="seq_mean_token_sum_norm"), TOTALS, columns()["completion_length"])
    assert weights.tolist() == [1 / 12] * 8


@settings(max_examples=300, deadline=None)
@given(logprob=LOGPROBS, reference=LOGPROBS)
def test_divergence_is_never_negative(logprob: float, reference: float) -> None:
    for dtype in (torch.float32, torch.float64):
        value = float(kl_k3(torch.tensor(logprob, dtype=dtype), torch.tensor(reference, dtype=dtype)))
        # expm1(x) - x is rounded once: below zero by no more than the rounding of x.
        assert value >= -abs(logprob - reference) * torch.finfo(dtype).eps
        assert (value == 0) or logprob != reference


def test_divergence_of_equals_is_zero_with_no_gradient() -> None:
    logprobs = torch.tensor([-3.7, -0.1], requires_grad=True)
    divergence = kl_k3(logprobs, logprobs.detach())
    assert divergence.tolist() == [0.0, 0.0]
    divergence.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_divergence_is_an_estimate_of_kl() -> None:
    # The expectation of k3 under the policy is KL(policy || reference), here computed exactly over a small vocabulary.
    policy, reference = (torch.randn(9, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    assert float((policy.exp() * kl_k3(policy, reference)).sum()) == pytest.approx(float(exact), rel=1e-12)


# ratio, advantage -> is the gradient cut off? PPO clips only moves that go further in the rewarded direction.
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
    assert set(LOSSES) == {LossConfig().kind}


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
