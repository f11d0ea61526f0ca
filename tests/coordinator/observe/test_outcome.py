"""Tests the summary of a run in the terminal."""

import io
from pathlib import Path

from rich.console import Console

from services.coordinator.observe.outcome import Outcome, show


def test_a_number_that_only_one_of_the_evaluations_has_is_shown() -> None:
    evaluations = [
        {"version": 0, "eval/test/reward": 0.25},
        {"version": 2, "eval/test/reward": 0.5, "eval/test/failed": 3.0},
    ]
    output = io.StringIO()
    show(Outcome(Path("runs/run"), 2, 2, evaluations, None), {}, Console(file=output, width=80), number=".2f")
    rows = [line.replace("│", " ").split() for line in output.getvalue().splitlines()]
    assert ["test/reward", "0.25", "0.50"] in rows
    assert ["test/failed", "-", "3.00"] in rows


def test_the_best_checkpoint_is_named() -> None:
    output = io.StringIO()
    outcome = Outcome(Path("runs/run"), 9, 9, [], None, {"version": 6, "eval/test/reward": 0.5})
    show(outcome, {"logs/": "logs"}, Console(file=output, width=80), number=".2f")
    assert "  checkpoints/step-000006      the best checkpoint, by checkpoint.keep_best\n" in output.getvalue()
