"""Tests the metrics of a batch against values computed by hand."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from services.common.config.evaluation import EvalSetConfig
from services.common.config.reward import RewardConfig
from services.coordinator.rl.evaluation import set_metrics
from services.coordinator.rl.metrics import _idle, batch_metrics
from tests.coordinator.rl.advantages.harness import row, table


def scored(group: int, reward: float, num_tokens: int, finish_reason: str, components: dict) -> dict:
    return row(reward, num_tokens, group, finish_reason=finish_reason, components=list(components.items()))


def test_metrics_of_a_batch():
    rows = [
        scored(0, 1.0, 2, "stop", {"math": 1.0, "format": 0.5}),
        scored(0, 0.0, 4, "length", {"math": 0.0}),
        scored(1, 1.0, 6, "stop", {"math": 1.0}),
        scored(1, 0.7 + 0.2 + 0.1, 8, "stop", {"math": 1.0}),  # a little less than 1, which does not make it another
    ]
    assert batch_metrics(table(rows)) == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/std": math.sqrt(3) / 4,
            "reward/mixed_groups": 0.5,
            "reward/math": 0.75,
            "reward/format": 0.125,  # as in the reward, samples that do not have it count 0
            "completion/tokens_mean": 5.0,
            "completion/tokens_max": 8.0,
            "completion/truncated": 0.25,
            "batch/samples": 4.0,
            "batch/tokens": 20.0,
        }
    )


def test_no_scorer_has_the_name_of_another_metric():
    samples = table([row(reward, components=[("exact", reward)]) for reward in (0.0, 1.0)])
    settings = EvalSetConfig(temperature=1, num_samples=2, pass_k=(1, 2))
    names = {name.removeprefix("reward/") for name in batch_metrics(samples) if name.startswith("reward/")}
    names |= set_metrics(samples, settings, np.zeros(2, bool)).keys() | {"failed", "reward[task=x]"}
    for name in names - {"exact"}:
        with pytest.raises(ValidationError, match=r"is taken by another metric|should match pattern"):
            RewardConfig.model_validate({"scorers": [{"kind": "exact", "name": name}]})
        # A run that was begun before has its metrics as they are.
        renamed = table([row(reward, components=[(name, 9.0)]) for reward in (0.0, 1.0)])
        assert (
            batch_metrics(renamed)["reward/mean"] == set_metrics(renamed, settings, np.zeros(2, bool))["reward"] == 0.5
        )


def test_a_sample_that_was_not_scored_does_not_pass():
    settings = EvalSetConfig(temperature=1, num_samples=2, pass_k=(1,), pass_threshold=0)
    samples = table([row(-1, components=[("judge", -1.0)]), row(0, components=[("length", 0.0)])])
    for is_failed, chance in ((False, 0.5), (True, 0.0)):
        assert set_metrics(samples, settings, np.array([False, is_failed]))["pass@1"] == chance


@pytest.mark.parametrize(
    ("measured", "rollout_s", "trainer_s"),
    [
        (
            {"time/generate_busy_s": 7.0, "time/train_busy_s": 6.0, "train/train_s": 4.0},
            3.0,
            6.0,
        ),  # it waited for blocks
        ({"time/generate_busy_s": 7.0, "time/train_busy_s": 6.0}, 3.0, 4.0),
        ({"time/train_busy_s": 6.0, "train/train_s": 6.5}, 10.0, 4.0),  # the batch was generated before
    ],
)
def test_each_side_is_idle_for_the_rest_of_the_step(measured: dict, rollout_s: float, trainer_s: float):
    idle = _idle({"time/step_s": 10.0, **measured})
    assert (idle["time/idle_rollout_s"], idle["time/idle_trainer_s"]) == (rollout_s, trainer_s)


def per_token(rows: list[dict]) -> dict[str, float]:
    names = ("advantage/", "kl/", "value/")
    return {name: value for name, value in batch_metrics(table(rows)).items() if name.startswith(names)}


def test_numbers_of_trained_tokens():
    rows = [
        # The masked token's numbers are ignored.
        row(1, 3, loss_mask=[True, False, True], advantages=[1, 99, 3], logprobs=[-1, -9, -1], ref_logprobs=[-2, 0, -4])
        | {"values": [0, 99, 1], "returns": [1, -99, 2]},
        row(0, 1, loss_mask=[True], advantages=[-4], ref_logprobs=[-0.5], values=[1], returns=[0]),
    ]
    assert per_token(rows) == pytest.approx(
        {
            "advantage/mean": 0.0,  # of 1, 3, -4
            "advantage/std": math.sqrt(26 / 3),
            "advantage/min": -4.0,
            "advantage/max": 3.0,
            "kl/token_mean": 3.5 / 3,  # 1, 3 and -0.5
            "kl/sample_mean": 1.75,
            "value/mean": 2 / 3,
            # Errors 1, 1, -1: variance 1 - 1 / 9 = 8 / 9; returns 1, 2, 0: variance 2 / 3
            "value/explained_variance": 1 - (8 / 9) / (2 / 3),
        }
    )


def test_explained_variance_of_a_perfect_and_of_a_constant_critic():
    rows = [row(reward, 2, returns=[reward] * 2) for reward in (0, 1)]
    perfect = [r | {"values": r["returns"]} for r in rows]
    constant = [r | {"values": [0.3, 0.3]} for r in rows]
    assert per_token(perfect)["value/explained_variance"] == 1
    assert per_token(constant)["value/explained_variance"] == pytest.approx(0, abs=1e-6)  # 0.3 is rounded to float32
    alike = [r | {"values": [0, 1], "returns": [1, 1]} for r in rows]  # the returns have no variance to explain
    assert per_token(alike) == {"value/mean": 0.5}


def test_numbers_of_a_batch_without_a_trained_token_are_left_out():
    assert per_token([row(1, 2, loss_mask=[False, False], advantages=[0, 0])]) == {}


def test_a_call_that_several_segments_of_an_agent_continue_is_one_turn():
    first, second, third = ({"number": n, "parent": p, "sha256": ""} for n, p in ((0, None), (1, 0), (2, 0)))
    turns = {"turn_begins": [0, 2], "turn_ends": [1, 3], "turn_rewards": [0, 0], "environment": "e"}
    rows = [row(1, 3, segment=0, calls=[first, second], loss_mask=[True, False, True], **turns)]
    rows += [row(1, 3, segment=1, calls=[first, third], loss_mask=[False, False, True], **turns)]
    rows += [row(1, 3, sample=1, segment=0, calls=[first, second], loss_mask=[True, False, True], **turns)]
    metrics = batch_metrics(table(rows))
    assert (metrics["episode/turns_mean"], metrics["episode/turns_max"]) == (2.5, 3)
