"""Tests each kind's loss and gradient at single tokens by hand, and gradients against finite differences."""

import math
from typing import Any

import pytest
import torch

from services.common.config.loss import LossConfig
from services.trainer.losses.policy import LOSSES, Totals, policy_loss

LOGPROB = -1.5


def at_tokens(config: LossConfig, ratios: list[float], advantage: float, **columns: float) -> Any:
    """Returns loss, gradients and metrics of a sequence of tokens, each with its ratio of policy to old policy.

    The loss is the sum over the tokens; the gradients are those of the tokens' log-probabilities.
    """
    n = len(ratios)
    logprobs = torch.full((n,), columns.pop("logprob", LOGPROB), dtype=torch.float64, requires_grad=True)
    values = {"advantages": advantage, "loss_mask": 1.0, "completion_length": n, "behavior_logprobs": 0.0, **columns}
    tensors = {name: torch.full((n,), float(value), dtype=torch.float64) for name, value in values.items()}
    tensors["old_logprobs"] = logprobs.detach() - torch.tensor(ratios, dtype=torch.float64).log()
    outputs = torch.stack([logprobs, torch.zeros_like(logprobs)])
    loss, metrics = policy_loss(outputs, tensors, (n,), Totals(1, 1), config)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in metrics.items()}


def check(config: LossConfig, ratio: float, advantage: float, want: tuple[float, float], **columns: float) -> None:
    loss, (gradient,), _ = at_tokens(config, [ratio], advantage, **columns)
    # Ratios pass through a logarithm and an exponential, which are a few roundings of 1e-16.
    assert (loss, gradient) == pytest.approx(want, rel=1e-14, abs=1e-14)


# Each row: the ratio, the advantage, and (the loss, the gradient of the log-probability).
CLIPPED = [
    (1.0, 2.0, (-2.0, -2.0)),
    (1.1, 2.0, (-2.2, -2.2)),
    (1.5, 2.0, (-2.6, 0.0)),  # the ratio counts as 1.3 at most
    (0.5, 2.0, (-1.0, -1.0)),
    (0.5, -2.0, (1.8, 0.0)),  # the ratio counts as 0.9 at least
    (1.5, -2.0, (3.0, 3.0)),
    (4.0, -2.0, (8.0, 8.0)),
]


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
@pytest.mark.parametrize(("ratio", "advantage", "want"), CLIPPED)
def test_clipped_surrogate(kind: str, ratio: float, advantage: float, want: tuple[float, float]) -> None:
    check(LossConfig(kind=kind, clip_low=0.1, clip_high=0.3), ratio, advantage, want)


@pytest.mark.parametrize(
    ("ratio", "advantage", "want", "binds"),
    [
        (2.9, -2.0, (5.8, 5.8), 0),
        (4.0, -2.0, (6.0, 0.0), 1),  # the ratio counts as 3 at most
        (4.0, 2.0, (-2.4, 0.0), 0),  # the clip of PPO
        (0.5, -2.0, (1.6, 0.0), 0),
    ],
)
def test_dual_clip(ratio: float, advantage: float, want: tuple[float, float], binds: float) -> None:
    config = LossConfig(clip_dual=3.0)
    check(config, ratio, advantage, want)
    assert at_tokens(config, [ratio], advantage)[2]["clip_dual_fraction"] == binds


@pytest.mark.parametrize(
    ("ratios", "advantage", "clipped"),
    [([1.01, 1.01], 2.0, True), ([1.02, 1 / 1.03], 2.0, False), ([0.99, 0.99], -2.0, True), ([0.9, 1.2], -2.0, False)],
)
def test_gspo_clips_whole_sequences(ratios: list[float], advantage: float, clipped: bool) -> None:
    config = LossConfig(kind="gspo", gspo={"clip_low": 0.005, "clip_high": 0.008})
    loss, gradients, metrics = at_tokens(config, ratios, advantage)
    mean = math.sqrt(math.prod(ratios))
    bound = 1.008 if advantage > 0 else 0.995
    assert loss == pytest.approx(-advantage * 2 * (bound if clipped else mean), rel=1e-14)
    assert gradients == pytest.approx([0 if clipped else -advantage * mean] * 2, rel=1e-14)
    assert metrics["clip_fraction"] == 2 * clipped


def test_gspo_clamps_the_mean_of_a_sequence_and_not_its_tokens() -> None:
    config = LossConfig(kind="gspo")
    loss, gradients, _ = at_tokens(config, [math.exp(-60), 1.0, 1.0], -1.0)
    assert loss == pytest.approx(3 * (1 - config.gspo.clip_low), rel=1e-14)
    loss, gradients, _ = at_tokens(config, [math.exp(40), 1.0, 1.0], -1.0)
    assert loss == pytest.approx(3 * math.exp(40 / 3), rel=1e-12)
    assert gradients == pytest.approx([math.exp(40 / 3)] * 3, rel=1e-12)
    loss, gradients, _ = at_tokens(config, [math.exp(90), 1.0, 1.0], -1.0)
    assert loss == pytest.approx(3 * math.exp(20), rel=1e-12)
    assert gradients == [0, 0, 0]


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "kept"),
    [
        ([0.1, -0.3], 2.0, [0.1, -0.3]),
        ([0.5, -0.9], 2.0, [0.3, -0.9]),  # where A > 0 only high ratios are clipped
        ([0.5, -0.9], -2.0, [0.5, -0.2]),  # where A < 0 only low ones
        ([-0.4, -0.6], -2.0, [-0.2, -0.2]),
        ([0.5, -60.0], 2.0, [0.3, -60.0]),  # the mean is clamped, to -20 at least: here it is -29.85
        ([0.5, -30.0], 2.0, [0.3, -30.0]),
    ],
)
def test_gmpo_clips_tokens_in_a_geometric_mean(log_ratios: list[float], advantage: float, kept: list[float]) -> None:
    config = LossConfig(kind="gmpo", gmpo={"clip_low": 0.2, "clip_high": 0.3}, aggregation="seq_mean_token_mean")
    loss, gradients, metrics = at_tokens(config, list(map(math.exp, log_ratios)), advantage)
    mean = math.exp(max(sum(kept) / 2, -20))
    is_free = [own == bounded and sum(kept) / 2 > -20 for own, bounded in zip(log_ratios, kept, strict=True)]
    assert loss == pytest.approx(-advantage * mean, rel=1e-13)
    assert gradients == pytest.approx([-advantage * mean / 2 * free for free in is_free], rel=1e-13)
    assert metrics["clip_fraction"] == sum(own != bounded for own, bounded in zip(log_ratios, kept, strict=True))


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 1.0), (0.01, 0.5), (3.0, 3.0), (9.0, 4.0)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_keeps_every_gradient(ratio: float, weight: float, advantage: float) -> None:
    config = LossConfig(kind="cispo", cispo={"min_ratio": 0.5, "max_ratio": 4.0})
    check(config, ratio, advantage, (-weight * advantage * LOGPROB, -weight * advantage))


@pytest.mark.parametrize(
    ("ratio", "advantage", "want"),
    [
        (1.0, 2.0, (-4.0, -2.0)),  # 4 / 1 * 1/2
        (1 + math.log(3), 2.0, (-6.0, -1.5 * (1 + math.log(3)))),  # gate 3/4, slope 3/16
        (1.0, -2.0, (2.0, 2.0)),  # 4 / 2 * 1/2
        (1 + math.log(3) / 2, -2.0, (3.0, 1.5 * (1 + math.log(3) / 2))),
    ],
)
def test_sapo_fades(ratio: float, advantage: float, want: tuple[float, float]) -> None:
    check(LossConfig(kind="sapo", sapo={"tau_positive": 1.0, "tau_negative": 2.0}), ratio, advantage, want)


@pytest.mark.parametrize(("covariance", "selected"), [(1.9, False), (2.0, True), (-9.0, False)])
@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_tokens_of_large_covariance_are_held_back(ratio: float, covariance: float, selected: bool) -> None:
    plain = (-2 * ratio, -2 * ratio)
    config = LossConfig(kind="clip_cov", clip_cov={"min_covariance": 2.0})
    check(config, ratio, 2.0, (0.0, 0.0) if selected else plain, covariance=covariance)
    config = LossConfig(kind="kl_cov", kl_cov={"min_covariance": 2.0, "coef": 0.5})
    penalty, slope = 0.5 * abs(math.log(ratio)), 0.5 * math.copysign(1, ratio - 1)
    want = (plain[0] + penalty, plain[1] + slope) if selected else plain
    check(config, ratio, 2.0, want, covariance=covariance)
    metrics = at_tokens(config, [ratio], 2.0, covariance=covariance)[2]
    assert metrics["covariance_fraction"] == selected


@pytest.mark.parametrize(
    ("probability", "ratio", "advantage", "masked"),
    [
        (0.02, 20.0, 1.0, False),  # a rare token may grow by any ratio
        (0.60, 1.5, 1.0, True),  # the old probability is 0.4
        (0.60, 1.5, -1.0, False),  # the gradient moves it back
        (0.60, 1.1, 1.0, False),
        (0.40, 0.5, -1.0, True),  # the old probability is 0.8
        (0.40, 0.5, 1.0, False),
    ],
)
def test_dppo_bounds_the_divergence(probability: float, ratio: float, advantage: float, masked: bool) -> None:
    old = probability / ratio
    kl = old * math.log(old / probability) + (1 - old) * math.log((1 - old) / (1 - probability))
    want = (0.0, 0.0) if masked else (-advantage * ratio, -advantage * ratio)
    for divergence, threshold in (("tv", 0.15), ("kl", 0.06)):
        config = LossConfig(kind="dppo", dppo={"divergence": divergence, "threshold": threshold})
        check(config, ratio, advantage, want, logprob=math.log(probability))
    # The mask begins at exactly these divergences, not at other numbers near them.
    moved = advantage * (ratio - 1) > 0
    for divergence, value in (("tv", abs(old - probability)), ("kl", kl)):
        for share, is_masked in ((0.999, moved), (1.001, False)):
            config = LossConfig(kind="dppo", dppo={"divergence": divergence, "threshold": share * value})
            assert (at_tokens(config, [ratio], advantage, logprob=math.log(probability))[0] == 0) == is_masked


def test_dppo_bounds_the_weight_of_a_token() -> None:
    config = LossConfig(kind="dppo", dppo={"max_ratio": 4.0})
    check(config, 3.0, -2.0, (6.0, 6.0), logprob=-5.0)
    check(config, 9.0, -2.0, (8.0, 8.0), logprob=-5.0)  # the gradient is kept, with the ratio at its bound


def test_dppo_is_finite_for_certain_tokens() -> None:
    config = LossConfig(kind="dppo", dppo={"divergence": "kl", "threshold": 0.05})
    check(config, 1.0, 2.0, (-2.0, -2.0), logprob=0.0)


def test_reinforce_and_sft() -> None:
    check(LossConfig(kind="reinforce"), 1.7, 2.0, (-2 * LOGPROB, -2.0))
    check(LossConfig(kind="sft"), 1.7, math.nan, (-LOGPROB, -1.0))  # advantages are not read


def test_penalty_and_bonus_are_added() -> None:
    config = LossConfig(kind="reinforce", kl_coef=0.5, kl_kind="k2")
    check(config, 1.0, 2.0, (-2 * LOGPROB + 0.5 * 0.5**2 / 2, -2 + 0.5 * 0.5), ref_logprobs=LOGPROB - 0.5)
    entropy = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    names = ("old_logprobs", "behavior_logprobs", "loss_mask", "completion_length")
    outputs = torch.stack([-one, entropy])
    config = LossConfig(kind="sft", entropy_coef=0.1)
    loss, metrics = policy_loss(outputs, dict.fromkeys(names, one), (1,), Totals(1, 1), config)
    loss.backward()
    assert loss.item() == pytest.approx(1 - 0.1 * 0.7, rel=1e-15)
    assert entropy.grad.item() == pytest.approx(-0.1, rel=1e-15)
    assert (metrics["policy_loss"].item(), metrics["entropy"].item()) == (1, 0.7)


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind not in ("python", "sft", "reinforce")])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
def test_no_ratio_overflows(kind: str, advantage: float, log_ratio: float) -> None:
    """Checks that results are finite at ratios of e^100 and e^-100; float32 has no number above e^88.7.

    An infinite ratio would become NaN if it is multiplied by an advantage of 0, or in a backward pass.
    """
    logprobs_N = torch.full((2,), LOGPROB, requires_grad=True)
    names = ("loss_mask", "completion_length", "behavior_logprobs", "covariance")
    columns = {name: torch.full((2,), 2.0) for name in names} | {"advantages": torch.full((2,), advantage)}
    columns |= {"ref_logprobs": logprobs_N.detach() + log_ratio, "old_logprobs": logprobs_N.detach() - log_ratio}
    config = LossConfig(kind=kind, kl_coef=0.1)
    outputs_2N = torch.stack([logprobs_N, torch.zeros(2)])
    loss, metrics = policy_loss(outputs_2N, columns, (2,), Totals(2, 1), config)
    loss.backward()
    assert all(math.isfinite(value) for value in (loss.item(), *logprobs_N.grad.tolist(), *metrics.values()))


def test_a_ratio_is_clamped_as_in_verl() -> None:
    """Checks that a token whose ratio is beyond e^20 counts as e^20 and has no gradient."""
    config = LossConfig(kind="kl_cov", kl_cov={"min_covariance": 1.0})
    for log_ratio, slope in ((19.0, 2 * math.exp(19)), (21.0, 0.0)):
        want = (2 * math.exp(min(log_ratio, 20)), slope)
        loss, (gradient,), _ = at_tokens(config, [math.exp(log_ratio)], -2.0, covariance=0.0)
        assert (loss, gradient) == pytest.approx(want, rel=1e-12)


# None of these has a stop-gradient; gspo, gmpo and cispo have one, and are compared with their papers' forms elsewhere.
@pytest.mark.parametrize(
    "config",
    [
        LossConfig(clip_low=0.1, clip_high=0.3, clip_dual=2.0),
        LossConfig(kind="sapo"),
        LossConfig(kind="clip_cov", clip_cov={"min_covariance": 0.5}),
        LossConfig(kind="kl_cov", kl_cov={"min_covariance": 0.5}),
        LossConfig(kind="dppo", dppo={"threshold": 0.02}),
        LossConfig(kind="reinforce"),
        LossConfig(kind="sft"),
        *(LossConfig(kind="sft", kl_coef=0.3, kl_kind=kind, entropy_coef=0.1) for kind in ("k1", "k2", "k3", "abs")),
    ],
    ids=lambda config: f"{config.kind}-{config.kl_kind if config.kl_coef else ''}",
)
def test_gradient_is_the_finite_difference(config: LossConfig) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(size: int = 8) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    columns = {name: -2 + 0.5 * random() for name in ("old_logprobs", "ref_logprobs", "behavior_logprobs")}
    columns |= {"advantages": random(), "covariance": random()}
    columns["loss_mask"] = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1], dtype=torch.float64)
    columns["completion_length"] = torch.tensor([2.0, 2, 2, 0, 4, 4, 4, 4], dtype=torch.float64)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return policy_loss(torch.stack([logprobs, entropy]), columns, (3, 1, 4), Totals(6, 2), config)[0]

    inputs = ((-2 + 0.5 * random()).requires_grad_(), random().requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-9, rtol=1e-7)
