"""Tests what a report draws of a step: its lanes, in the report and as text, and rewards by column."""

from benchmarks.loop import drawing
from services.coordinator.observe.report import curves
from services.coordinator.observe.report.page import lanes

STEP = {
    "step": 3,
    "time/step_s": 10.0,
    "time/generate_begin_s": 0.0,
    "time/generate_end_s": 5.0,
    "time/generate_busy_s": 4.0,
    "time/train_begin_s": 2.5,
    "time/train_end_s": 9.0,
    "time/train_busy_s": 5.0,
}


def test_a_step_has_the_lanes_that_were_busy() -> None:
    evaluation = {"step": 3, "eval/test/reward": 0.5}
    older = {"step": 1, "time/step_s": 4.0, "time/generating_s": 1.0}
    assert lanes([older, STEP, evaluation]) == [
        {"step": 3, "seconds": 10.0, "lanes": [("generate", 0.0, 5.0, 4.0), ("train", 2.5, 9.0, 5.0)]}
    ]


def test_a_lane_that_was_idle_for_a_whole_step_has_zeros() -> None:
    last = {"step": 4, "time/step_s": 4.0, "time/train_begin_s": 0.0, "time/train_end_s": 4.0, "time/train_busy_s": 3.0}
    assert lanes([STEP, last])[1]["lanes"] == [("generate", 0.0, 0.0, 0.0), ("train", 0.0, 4.0, 3.0)]


def test_lanes_as_text() -> None:
    assert max(map(len, drawing(STEP | {"time/step_s": 99.0}).splitlines())) <= 80
    assert drawing(STEP).splitlines() == [
        f"{'':>10}0 s{'10.0 s':>41}",
        f" generate {'#' * 22:<44} busy 4.0 s, idle 6.0 s",
        f"    train {' ' * 11 + '#' * 29:<44} busy 5.0 s, idle 5.0 s",
    ]


def test_rewards_by_column_are_a_plot() -> None:
    rows = [
        {"step": 0, "eval/test/reward[task=sum]": 0.25},
        {"step": 1, "time/step_s": 1.0, "reward[task=sum]": 0.5, "reward[task=carry]": 0.0},
        {"step": 2, "time/step_s": 1.0, "reward[task=sum]": 0.75, "eval/test/reward[task=sum]": 1.0},
    ]
    (plot,) = curves.panels(rows)
    assert plot["title"] == "Reward by column"
    assert {one["name"]: (one["x"], one["y"]) for one in plot["series"]} == {
        "task=carry": ([1], [0.0]),
        "task=sum": ([1, 2], [0.5, 0.75]),
        "test task=sum": ([0, 2], [0.25, 1.0]),
    }
