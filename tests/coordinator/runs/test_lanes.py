"""Tests when each side of a run counts as busy, with a clock that the test sets."""

import time

import pytest

from services.coordinator.observe.reporters import OpeningTimes
from services.coordinator.runs.clock import Busy, Phase, StepClock, lane_metrics


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_calls_that_overlap_are_counted_once(clock: Clock) -> None:
    busy = Busy()
    clock.now = 101
    with busy.working():
        clock.now = 102
        with busy.working():
            clock.now = 104
    clock.now = 107
    with busy.working():
        clock.now = 108
    assert lane_metrics({"score": busy, "train": Busy()}, 100, 110) == {
        "time/score_begin_s": 1,
        "time/score_end_s": 8,
        "time/score_busy_s": 4,
    }
    assert busy.take(110, 120) == []


def test_a_call_in_progress_is_cut_at_the_end_of_the_step(clock: Clock) -> None:
    busy = Busy()
    with busy.working():
        clock.now = 105
        assert busy.take(102, 105) == [(0, 3)]
        clock.now = 107
    assert busy.take(105, 110) == [(0, 2)]


def test_phases_that_overlap_leave_nothing_outside(clock: Clock) -> None:
    steps = StepClock()
    with steps.measure(Phase.GENERATING):
        clock.now = 102
        with steps.measure(Phase.TRAINING):
            clock.now = 105
        clock.now = 106
    with steps.measure(Phase.PUBLISHING):
        clock.now = 108
    clock.now = 110
    found = steps.metrics()
    assert found == {
        "time/generating_s": 6,
        "time/training_s": 3,
        "time/publishing_s": 2,
        "time/publish_begin_s": 6,
        "time/publish_end_s": 8,
        "time/publish_busy_s": 2,
        "time/step_s": 10,
        "time/outside_share": pytest.approx(0.2),
    }


def test_what_an_evaluation_does_is_in_no_lane(clock: Clock) -> None:
    steps = StepClock()
    steps.lanes["generate"] = generate = Busy()
    with steps.measure(Phase.PUBLISHING):
        clock.now = 102
    with steps.measure(Phase.EVALUATING), generate.working():
        clock.now = 105
    assert steps.take(Phase.EVALUATING) == 3
    with steps.measure(Phase.GENERATING), generate.working():
        clock.now = 109
    found = steps.metrics()
    assert {name: value for name, value in found.items() if "generate_" in name or "publish_" in name} == {
        "time/publish_begin_s": 0,
        "time/publish_end_s": 2,
        "time/publish_busy_s": 2,
        "time/generate_begin_s": 2,
        "time/generate_end_s": 6,
        "time/generate_busy_s": 4,
    }
    assert found["time/step_s"] == 6


def test_the_first_step_says_how_long_the_services_took_to_open() -> None:
    steps = StepClock()
    opening = OpeningTimes(steps)
    opening.stage("trainer", "load the policy model", 0.0)
    opening.stage("trainer", "load the policy model", 0.0, 3.5)
    opening.begin_phase("generating", 0)
    opening.stage("trainer", "save a checkpoint", 0.0, 9.0)
    first, second = steps.metrics(), steps.metrics()
    assert {name: first[name] for name in first if "open_" in name} == {
        "time/open_trainer_load_the_policy_model_s": 3.5
    }
    assert not any("open_" in name for name in second)
