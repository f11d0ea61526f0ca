"""Advantages and metrics of a batch against values worked out by hand."""

import math

import numpy as np
import pyarrow as pa
import pytest

from services.common.batch import SAMPLE_SCHEMA
from services.common.config.advantage import AdvantageConfig
from services.coordinator.advantages import estimator
from services.coordinator.metrics import batch_metrics


@pytest.mark.parametrize(
    ("config", "rewards", "expected"),
    [
        # mean 0.25, sample deviation sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5
        ({"kind": "grpo", "eps": 1e-12}, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        # mean 2, sample deviation 1, eps 1 halves it
        ({"kind": "grpo", "eps": 1.0}, [1, 2, 3], [-0.5, 0, 0.5]),
        ({"kind": "dr_grpo"}, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ({"kind": "grpo"}, [0.7] * 3, [0, 0, 0]),
        ({"kind": "dr_grpo"}, [-2, 2], [-2, 2]),
    ],
)
def test_advantages(config: dict, rewards: list, expected: list):
    advantages = estimator(AdvantageConfig(**config))(np.array(rewards, float))
    assert advantages == pytest.approx(expected, abs=1e-9)


def row(group: int, sample: int, reward: float, num_tokens: int, finish_reason: str, components: dict) -> dict:
    return {
        "prompt_id": f"p{group}",
        "group": group,
        "sample": sample,
        "prompt_tokens": [3],
        "tokens": [4] * num_tokens,
        "logprobs": [-1.0] * num_tokens,
        "reward": reward,
        "components": list(components.items()),
        "finish_reason": finish_reason,
        "policy_version": 0,
        "policy_digest": "d",
        "scorer": "s",
        "seed": 0,
    }


def test_metrics_of_a_batch():
    rows = [
        row(0, 0, 1.0, 2, "stop", {"math": 1.0, "format": 0.0}),
        row(0, 1, 0.0, 4, "length", {"math": 0.0}),
        row(1, 0, 1.0, 6, "stop", {"math": 1.0}),
        row(1, 1, 1.0, 8, "stop", {"math": 1.0}),
    ]
    assert batch_metrics(pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)) == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/std": math.sqrt(3) / 4,
            "reward/mixed_groups": 0.5,
            "reward/math": 0.75,
            "reward/format": 0.0,  # of the one sample that has it
            "completion/tokens_mean": 5.0,
            "completion/tokens_max": 8.0,
            "completion/truncated": 0.25,
            "batch/samples": 4.0,
            "batch/tokens": 20.0,
        }
    )
