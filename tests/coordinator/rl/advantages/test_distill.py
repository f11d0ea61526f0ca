"""Tests the advantage toward a teacher: its sign, its token, and what it is added to."""

from typing import Any

import pytest
from hypothesis import given, settings

from services.common.config.advantage import AdvantageConfig
from services.common.errors import InvalidInput
from services.coordinator.rl.advantages import compute_advantages
from services.coordinator.rl.metrics import batch_metrics
from tests.coordinator.rl.advantages.harness import Row, batches, computed, flat, row, table
from tests.support import raises

# The teacher finds the first token e^2 times as likely as the policy does, and the second e times less likely.
ROW = {"logprobs": [-3.0, -1.0], "teacher_logprobs": [-1.0, -2.0]}


@pytest.mark.parametrize(("coef", "expected"), [(None, [2, -1]), (0.5, [1, -0.5])])
def test_the_policy_moves_toward_what_the_teacher_finds_likelier(coef: float | None, expected: list[float]) -> None:
    assert computed([row(7, 2, **ROW)], kind="distill", distill_coef=coef) == [expected]


def test_tokens_that_are_masked_get_nothing() -> None:
    assert computed([row(7, 2, **ROW, loss_mask=[False, True])], kind="distill") == [[0, -1]]


@pytest.mark.parametrize(
    ("config", "of_reward"),
    [({"kind": "dr_grpo"}, [0.5, -0.5]), ({"kind": "grpo", "normalize_std": False, "whiten": "group"}, [1, -1])],
)
def test_it_is_added_to_the_advantage_of_the_reward_after_whitening(config: Any, of_reward: list[float]) -> None:
    rows = [row(1, 2, **ROW), row(0, 2, **ROW)]
    expected = [[own + 0.25 * token for token in (2, -1)] for own in of_reward]
    for got, want in zip(computed(rows, distill_coef=0.25, **config), expected, strict=True):
        assert got == pytest.approx(want, abs=1e-5)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(batches)
def test_rewards_and_groups_do_not_matter_alone(rows: list[Row]) -> None:
    others = [one | {"reward": -3 * one["reward"], "group": number} for number, one in enumerate(rows)]
    config = AdvantageConfig(kind="distill")
    before, after = (compute_advantages(table(some), config)["advantages"] for some in (rows, others))
    assert flat(before.to_pylist()) == flat(after.to_pylist())


def test_a_batch_without_the_column_is_refused() -> None:
    with raises(InvalidInput, field="teacher_logprobs"):
        computed([row(0, 2)], kind="distill")
    with raises(InvalidInput, field="teacher_logprobs"):
        computed([row(0, 2, teacher_logprobs=[-1.0])], kind="distill")


def test_metrics_are_the_reverse_kl_in_nats() -> None:
    rows = [row(0, 2, **ROW), row(0, 1, logprobs=[-1.0], teacher_logprobs=[-5.0])]
    metrics = batch_metrics(table(rows))
    assert metrics["teacher_kl/token_mean"] == pytest.approx((-2 + 1 + 4) / 3)
    assert metrics["teacher_kl/sample_mean"] == pytest.approx((-2 + 1 + 4) / 2)
    assert "kl/token_mean" not in metrics
