"""Tests the summary of a run in the terminal."""

import io
from pathlib import Path

import pytest
from lockstep.types.v1.types_pb2 import PolicyStamp
from rich.table import Table

from services.coordinator.doctor import Finding, show_findings
from services.coordinator.observe.console import literal_console
from services.coordinator.observe.frontend import Outcome, show
from services.coordinator.rl.evaluation import Evaluation, show_evaluation
from services.coordinator.rl.session import show_outcome


def test_a_number_that_only_one_of_the_evaluations_has_is_shown() -> None:
    evaluations = [
        {"version": 0, "eval/test/reward": 0.25},
        {"version": 2, "eval/test/reward": 0.5, "eval/test/failed": 3.0},
    ]
    output = io.StringIO()
    show(Outcome(Path("runs/run"), 2, 2, evaluations, None), {}, literal_console(file=output, width=80), number=".2f")
    rows = [line.replace("│", " ").split() for line in output.getvalue().splitlines()]
    assert ["test/reward", "0.25", "0.50"] in rows
    assert ["test/failed", "-", "3.00"] in rows


NAMES = ("reward[level=1]", "[a]", "[/b]", ":key:")


def test_names_are_shown_as_they_are() -> None:
    output = io.StringIO()
    console = literal_console(file=output, width=120)
    metrics = {"version": 1, **{f"eval/test/{name}": 0.5 for name in NAMES}}
    show(Outcome(Path("runs/[a]"), 1, 1, [metrics], None), {}, console, number=".2f")
    show_evaluation(Evaluation(PolicyStamp(), {f"eval/[/b]/{name}": 0.5 for name in NAMES}, Path("runs/[a]")), console)
    show_findings([Finding(name, name, fix=name) for name in NAMES], console)
    shown = output.getvalue()
    assert all(shown.count(name) >= 5 for name in NAMES), shown
    assert "Files in runs/[a]:" in shown and "are in runs/[a]\n" in shown and "fix: [/b]" in shown


def test_only_what_the_run_has_written_is_named() -> None:
    for evaluations in ([], [{"version": 1, "eval/test/reward": 0.5}]):
        output = io.StringIO()
        show_outcome(Outcome(Path("runs/run"), 1, 1, evaluations, None), literal_console(file=output, width=80))
        assert ("  evaluations/" in output.getvalue()) is bool(evaluations)
        assert "  batches/" in output.getvalue() and "model/" not in output.getvalue()


@pytest.mark.parametrize(("is_start_better", "more"), [(False, ""), (True, ", but the starting model was better")])
def test_the_best_checkpoint_is_named(is_start_better: bool, more: str) -> None:
    output, best = io.StringIO(), {"version": 6, "eval/test/reward": 0.5}
    outcome = Outcome(Path("runs/run"), 9, 9, [], None, best, is_start_better=is_start_better)
    show(outcome, {"logs/": "logs"}, literal_console(file=output, width=80), number=".2f")
    assert f"  checkpoints/step-000006      the best checkpoint, by checkpoint.keep_best{more}\n" in output.getvalue()


def test_the_command_that_comes_next_can_be_copied() -> None:
    output = io.StringIO()
    show_outcome(Outcome(Path("runs/my run"), 1, 1, [], None), literal_console(file=output, width=80))
    assert "Next: `lockstep report 'runs/my run'`, or" in output.getvalue()


def test_a_message_cannot_control_the_terminal():
    output = io.StringIO()
    console, table = literal_console(file=output, width=80), Table("\x1b[2Jcell")
    console.print("no\x1b[31m name\u202e é\n", soft_wrap=True)
    assert output.getvalue() == "no\ufffd[31m name\ufffd é\n\n"
    console.print(table)
    assert "\ufffd[2Jcel" in output.getvalue()
