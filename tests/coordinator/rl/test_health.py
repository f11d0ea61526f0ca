"""Tests the warnings of steps that teach little, and that each is logged when it begins."""

import logging
from collections.abc import Mapping

import pytest
from lockstep.reward.v1 import reward_pb2 as pb

from services.common.config.operation import WarningsConfig
from services.coordinator.clients.environment import EnvironmentFailure
from services.coordinator.clients.reward import Rewards, reason_name
from services.coordinator.rl.metrics import warning_metrics
from tests.coordinator.fake_services import make_config


def steps(
    caplog: pytest.LogCaptureFixture, *metrics: Mapping[str, float], **settings: float
) -> tuple[list[dict[str, float]], list[str]]:
    """Returns the warning metrics of each step and all warnings, with the metrics as they are recorded."""
    before: Mapping[str, float] = {}
    found: list[dict[str, float]] = []
    with caplog.at_level(logging.WARNING):
        for number, one in enumerate(metrics, 1):
            whole = {"reward/mixed_groups": 1.0, "reward/mean": 0.0, "train/entropy": 1.0} | one
            found.append(warning_metrics(number, whole, before, WarningsConfig.model_validate(settings)))
            before = whole | found[-1]
    return found, [record.getMessage() for record in caplog.records]


def test_an_entropy_collapse_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found, lines = steps(caplog, *({"train/entropy": value} for value in (2.0, 0.3, 0.19, 0.21, 0.19, 0.31, 0.1)))
    assert [one["warning/entropy_collapse"] for one in found] == [0, 0, 1, 1, 1, 0, 1]
    assert {one["warning/first_entropy"] for one in found} == {2.0}
    assert [line.partition(":")[0] for line in lines] == ["step 3", "step 7"]
    assert "0.19 nats per token, after 2 in the first step" in lines[0] and "trainer.loss.entropy_coef" in lines[0]


def test_steps_without_a_mixed_group_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    mixed = ({"reward/mixed_groups": value} for value in (0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0))
    found, lines = steps(caplog, *mixed)
    assert [one["warning/steps_without_mixed_group"] for one in found] == [1, 2, 0, 1, 2, 3, 4]
    assert len(lines) == 1 and lines[0].startswith("step 6: no group had different rewards in 3 steps")


def test_dropped_groups_are_named_with_the_scorer(caplog: pytest.LogCaptureFixture) -> None:
    failed = {"sampling/failed/format/TIMEOUT": 1.0, "sampling/failed/math/ERROR": 3.0}
    dropped = {"sampling/prompts": 16.0, "sampling/dropped_no_score": 4.0, **failed}
    found, lines = steps(caplog, {"sampling/prompts": 16.0, "sampling/dropped_no_score": 1.0}, dropped)
    assert [one["warning/dropped_groups"] for one in found] == [1 / 16, 1 / 4]
    (line,) = lines
    assert "25% of the prompt groups (4) were dropped" in line and "math/ERROR in 3, format/TIMEOUT in 1" in line


def test_dropped_groups_are_named_with_every_reason_of_an_environment(caplog: pytest.LogCaptureFixture) -> None:
    dropped = {"sampling/prompts": 8.0, "sampling/dropped_no_score": 8.0, "sampling/failed/math/ERROR": 20.0}
    failed = {f"environment/failed_{reason}": float(n) for n, reason in enumerate(EnvironmentFailure, 1)}
    (line,) = steps(caplog, dropped | failed | {"environment/cache_hit_share": 0.5})[1]
    named = [f"environment/{reason} in {n}" for n, reason in enumerate(EnvironmentFailure, 1)]
    assert ": math/ERROR in 20, " + ", ".join(reversed(named)) + "; the log has" in line


@pytest.mark.parametrize("number", [*pb.FailureReason.values(), 99])
def test_every_reason_of_a_scorer_has_a_name(number: int) -> None:
    name = pb.FailureReason.Name(number) if number in pb.FailureReason.values() else "UNSPECIFIED"
    failure = pb.Failure(reason=number)  # type: ignore[arg-type]
    assert reason_name(failure) == name.removeprefix("FAILURE_REASON_")


def test_warnings_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    bad = {"reward/mixed_groups": 0.0, "train/entropy": 0.0, "sampling/prompts": 2.0, "sampling/dropped_no_score": 2.0}
    off = {"entropy_ratio": 0.0, "steps_without_mixed_group": 0, "dropped_groups": 1.0}
    assert steps(caplog, {}, *[bad] * 5, **off)[1] == []


async def test_failures_of_all_services_are_taken_once() -> None:
    rewards = Rewards(["127.0.0.1:1", "127.0.0.1:2"], make_config())
    for number, service in enumerate(rewards.services, 1):
        service.failures["math/ERROR"] += number
    assert rewards.take_failures() == {"math/ERROR": 3.0}
    assert rewards.take_failures() == {}
    await rewards.close()
