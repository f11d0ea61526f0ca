"""Tests the KL penalty in the reward and the controller of its coefficient."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.advantage import AdvantageConfig, KlConfig
from services.coordinator.rl.advantages import compute_advantages
from services.coordinator.rl.advantages.samples import coef_after, kl_record
from tests.coordinator.rl.advantages.harness import (
    KINDS,
    Row,
    batches,
    computed,
    flat,
    mask,
    net,
    penalties,
    row,
    table,
)

SUM_OVER_SAMPLES = [kind for kind in KINDS if AdvantageConfig(kind=kind).needs_group]
ADAPTIVE = KlConfig(coef=0.2, target=6.0, horizon=10000)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # log policy - log reference is 2 and then -1.
    [
        ("k1", [2, -1]),
        ("k2", [2, 0.5]),
        ("k3", [math.exp(-2) + 1, math.e - 2]),  # exp(-2) - 1 + 2 and exp(1) - 1 - 1
        ("abs", [2, 1]),
    ],
)
def test_penalty_of_each_token(kind: str, expected: list):
    rows = [row(0, 2, logprobs=[-1, -3], ref_logprobs=[-3, -2])]
    config = {"kind": "reinforce_plus_plus", "gamma": 0.0, "whiten": "none", "kl": {"coef": 0.5, "kind": kind}}
    assert computed(rows, **config)[0] == pytest.approx([-0.5 * number for number in expected], rel=1e-6)


def test_masked_tokens_are_not_penalised():
    # Only the first token is the policy's: 1 - 0.5 * 2 = 0 against 1, mean 0.5
    rows = [row(1, 2, logprobs=[-1, -9], ref_logprobs=[-3, -1], loss_mask=[True, False])]
    rows += [row(1, 2, logprobs=[-1, -1], ref_logprobs=[-1, -1])]
    assert computed(rows, kind="dr_grpo", kl={"coef": 0.5}) == [[-0.5, 0], [0.5, 0.5]]


@pytest.mark.parametrize("kind", SUM_OVER_SAMPLES)
def test_a_sample_that_is_left_out_is_penalised_like_the_others(kind: str):
    """Or finishing would be worth less than being cut off (overlong.mask_truncated)."""
    apart = {"logprobs": [-1, -1, -1], "ref_logprobs": [-2, -2, -2]}
    episode = {"turn_begins": [0, 2], "turn_ends": [1, 3], "turn_rewards": [0, 0], "environment": "e"}
    cut_off = row(0, 3, logprobs=[-1, -1, -1], ref_logprobs=[-2, -9, -3], loss_mask=[False] * 3, **episode)
    again = [{"number": 0, "parent": None, "sha256": ""}, {"number": 1, "parent": 0, "sha256": ""}]
    agent = [row(0, 3, sample=3, segment=k, calls=again, **apart, **episode, loss_mask=[False] * 3) for k in (0, 1)]
    agent[1] |= {"ref_logprobs": [-2, -2, -9], "calls": [again[0], again[0]]}  # both turns are there twice
    agent[0]["ref_logprobs"] = [-2, -9, -3]
    alone = [row(0, 3, **apart), row(0, 3, **apart) | {"loss_mask": [False] * 3}, cut_off]
    rows = [*(one | {"sample": number} for number, one in enumerate(alone)), *agent]
    assert computed(rows, kind=kind, kl={"coef": 0.1}) == [[0] * 3] * 5


@pytest.mark.parametrize("kind", SUM_OVER_SAMPLES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(rows=batches, estimate=st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_compared_samples_lose_the_sum_of_their_penalties(kind: str, rows: list[Row], estimate: str):
    config = AdvantageConfig(kind=kind, kl={"coef": 0.5, "kind": estimate})
    nets = [row | {"reward": net(row, config)} for row in rows]
    if kind == "gpg" and estimate == "k3":  # whether two rewards are equal would depend on the last bit of exp
        return
    advantages = compute_advantages(table(rows), config)["advantages"].to_pylist()
    assert flat(advantages) == pytest.approx(flat(computed(nets, kind=kind)), rel=1e-6, abs=1e-6)


def test_coefficient_of_the_step_wins_over_the_configured_one():
    rows = [row(1, 1, ref_logprobs=[-3]), row(1, 1, ref_logprobs=[-1])]
    config = AdvantageConfig(kind="dr_grpo", kl={"coef": 0.5})
    assert compute_advantages(table(rows), config)["advantages"].to_pylist() == [[-0.5], [0.5]]
    assert compute_advantages(table(rows), config, kl_coef=0.25)["advantages"].to_pylist() == [[-0.25], [0.25]]
    assert compute_advantages(table(rows), config, kl_coef=0.0)["advantages"].to_pylist() == [[0], [0]]


@pytest.mark.parametrize(
    ("measured", "num_samples", "expected"),
    [
        (6.0, 512, 0.2),  # on target
        (6.6, 1000, 0.2 * 1.01),  # 10 % above, a tenth of the horizon
        (600.0, 1000, 0.2 * 1.02),  # clipped at 20 %
        (0.0, 1000, 0.2 * 0.98),
        (-3.0, 1000, 0.2 * 0.98),  # k1 of a batch may be negative
        (600.0, 10**9, 0.2 * 1.2),  # more samples than the horizon move it no further than the horizon
        (0.0, 10**9, 0.2 * 0.8),
    ],
)
def test_next_coefficient(measured: float, num_samples: int, expected: float):
    before = {"kl_coef": 0.2, "kl_per_sample": measured, "num_samples": num_samples}
    assert coef_after(before, ADAPTIVE) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, derandomize=True)
@given(st.floats(1e-6, 10), st.floats(-100, 100), st.integers(1, 10**6))
def test_coefficient_follows_the_kl(coef: float, measured: float, num_samples: int):
    after = coef_after({"kl_coef": coef, "kl_per_sample": measured, "num_samples": num_samples}, ADAPTIVE)
    assert 0.8 * coef <= after * (1 + 1e-12) and after <= 1.2 * coef * (1 + 1e-12)
    assert after >= coef if measured >= ADAPTIVE.target else after <= coef


@settings(max_examples=10, deadline=None, derandomize=True)
@given(batches, st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_record_measures_what_is_penalised(rows: list[Row], kind: str):
    penalised = AdvantageConfig(kl={"coef": 1.0, "kind": kind})
    total = sum(sum(penalties(row, penalised)) for row in rows)
    num_trained = sum(any(mask(row)) for row in rows)
    assert kl_record(table(rows), 0.3, penalised.kl) == {
        "kl_coef": 0.3,
        "kl_per_sample": pytest.approx(total / max(num_trained, 1), rel=1e-9, abs=1e-12),
        "num_samples": num_trained,
    }


def test_resumed_run_goes_on_with_the_same_coefficient():
    steps = [[row(0, 1, logprobs=[-1], ref_logprobs=[-1 - kl])] * 50 for kl in (9, 1, 6.5, 30)]
    config = KlConfig(coef=0.2, target=6.0, horizon=100)
    records = [None]
    for rows in steps:
        records.append(kl_record(table(rows), coef_after(records[-1], config), config))
    coefs = [coef_after(before, config) for before in records]
    # 0.5 horizons each: errors 0.2 (clipped), -0.2 (clipped), 0.5 / 6, 0.2 (clipped)
    expected = [0.2, 0.2 * 1.1, 0.2 * 1.1 * 0.9]
    expected += [expected[-1] * (1 + 0.25 / 6), expected[-1] * (1 + 0.25 / 6) * 1.1]
    assert coefs == pytest.approx(expected, rel=1e-12)
    # A new coefficient in the config takes effect if it is constant, but not if it is adaptive.
    assert coef_after(records[2], KlConfig(coef=0.7)) == 0.7
    assert coef_after(records[2], config.model_copy(update={"coef": 0.7})) == coefs[2]
