"""Tests the table of a run in terminals of various widths."""

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from rich.console import Console

from services.coordinator.daemon.client import _runs_table
from services.coordinator.observe.frontend import log_to
from services.coordinator.observe.terminal import Terminal
from tests.coordinator.fake_services import make_config

STEP = {
    "reward/mean": 0.625,
    "reward/mixed_groups": 0.92,
    "batch/tokens": 123456.0,
    "train/entropy": 0.387,
    "train/grad_norm": 12.345,
    "train/logprob_diff_max": 2.9e-06,
    "time/generating_s": 123.45,
    "time/training_s": 67.89,
    "time/publishing_s": 1.23,
    "time/step_s": 192.57,
}
NUMBERS = {"0.625", "0.92", "123456", "0.387", "12.345", "2.9e-06", "123.45", "67.89", "1.23"}
NUM_STEPS = 30


def make_console(width: int, height: int, *, is_terminal: bool, kind: str = "xterm") -> Console:
    options: Any = {"force_terminal": is_terminal, "color_system": None, "_environ": {"TERM": kind}}
    return Console(file=io.StringIO(), width=width, height=height, **options)


def finished_terminal(console: Console) -> Terminal:
    """Returns a terminal after a run with two held-out sets."""
    terminal = Terminal(console, NUM_STEPS)
    for version in range(1, NUM_STEPS + 1):
        terminal.step(version, STEP)
        if version % 10 == 0:
            terminal.evaluation(version, {"eval/hard/reward": 0.25, "eval/easy/tokens_mean": 3, "eval/easy/reward": 1})
    terminal.close()
    return terminal


@pytest.mark.parametrize(
    ("width", "height", "num_columns", "num_rows"),
    [(40, 10, 4, 4), (80, 24, 7, 12), (100, 30, 9, 12), (120, 16, 11, 10)],
)
def test_numbers_in_the_live_table_are_whole(width: int, height: int, num_columns: int, num_rows: int):
    table = finished_terminal(make_console(width, height, is_terminal=True))._shown()
    console = make_console(width, height, is_terminal=False)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and len(lines) < height
    assert len(lines[1].split("┃")) - 2 == num_columns
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == [str(step) for step in range(NUM_STEPS - num_rows + 1, NUM_STEPS + 1)]
    assert rows[-1][1] == "1.000 0.250" and lines[1].split("┃")[2].split() == ["easy", "hard"]
    assert all({*row} - {row[0], row[1]} <= NUMBERS for row in rows)
    assert [len({*row} & NUMBERS) for row in rows] == [num_columns - 2] * num_rows


def shown_after_step(metrics: dict[str, float], width: int, *, is_terminal: bool) -> str:
    console = make_console(width, 24, is_terminal=is_terminal)
    terminal = Terminal(console, NUM_STEPS)
    terminal.step(1, metrics)
    if is_terminal:
        console = make_console(width, 24, is_terminal=False)
        console.print(terminal._shown())
    terminal.close()
    return console.file.getvalue()


MEASURED = STEP | {"time/generating_s": 64.51, "time/generate_busy_s": 0.10, "time/score_busy_s": 64.4}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_scoring_is_not_shown_as_generating(is_terminal: bool):
    text = shown_after_step(MEASURED, 80, is_terminal=is_terminal)
    lines = [line for line in text.splitlines() if "0.62" in line or "reward" in line]
    head, row = (re.split(r"\s*[┃│]\s*|\s{2,}", line.strip()) for line in lines)
    shown = dict(zip(head, row, strict=True))
    assert (shown["generate s"], shown["score s"], shown["train s"]) == ("0.10", "64.40", "67.89")
    assert shown["step"] == ("1" if is_terminal else f"1/{NUM_STEPS}")
    assert max(map(len, lines)) <= 80 or not is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_divergence_from_a_teacher_is_shown_if_there_is_one(is_terminal: bool):
    with_kl = shown_after_step(STEP | {"teacher_kl/token_mean": 0.875}, 200, is_terminal=is_terminal)
    without = shown_after_step(STEP, 200, is_terminal=is_terminal)
    assert "teacher KL" in with_kl and "0.875" in with_kl
    assert "teacher KL" not in without and "grad norm" in without


def test_held_out_sets_are_named():
    console = make_console(80, 24, is_terminal=True)
    terminal = Terminal(console, NUM_STEPS)
    terminal.step(1, MEASURED)
    terminal.evaluation(1, {"eval/math-of-a-long-name/reward": 0.5, "eval/x/reward": 0.25, "eval/x/pass@4": 1.0})
    table = make_console(80, 24, is_terminal=False)
    table.print(terminal._shown())
    terminal.close()
    lines = table.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (head,), (row,) = (
        [line for line in lines if "math-of-a-l…     x" in line],
        [line for line in lines if "0.250" in line],
    )
    assert row.index("0.500") + 5 == head.index("…") + 1 and row.index("0.250") + 4 == head.index(" x ") + 1
    assert "held-out reward after step 1: math-of-a-long-name 0.500, x 0.250" in console.file.getvalue()


def test_the_live_table_says_how_long_the_rest_takes():
    console = make_console(80, 24, is_terminal=True)
    terminal = Terminal(console, NUM_STEPS)
    captions = []
    for version, step_s in enumerate((10.0, 200.0, 12.0)):
        terminal.begin_phase("generating", version)
        captions.append(terminal._table(24).caption)
        terminal.step(version + 1, STEP | {"time/step_s": step_s})
    terminal.close()
    assert captions == [
        "step 1 of 30: generating",
        "step 2 of 30: generating, about 0:04:50 left",
        "step 3 of 30: generating, about 0:49:00 left",
    ]


@pytest.mark.parametrize(
    ("sets", "shown"), [(["held-out"], "0.500"), (["held-out", "level"], "held-out 0.500, level 0.500")]
)
def test_a_held_out_set_is_named_beside_others(sets: list[str], shown: str):
    console = make_console(80, 24, is_terminal=False)
    Terminal(console, NUM_STEPS).evaluation(0, {f"eval/{name}/reward": 0.5 for name in sets})
    assert f"held-out reward after step 0: {shown}\n" in console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_file_and_a_terminal_without_cursor_get_a_line_for_each_step(is_terminal: bool):
    console = make_console(40, 10, is_terminal=is_terminal, kind="dumb")
    assert not finished_terminal(console).shows_samples
    head, *lines = console.file.getvalue().splitlines()
    assert head.split()[-6:] == ["generate", "s", "train", "s", "publish", "s"]
    steps = [line for line in lines if not line.startswith("held-out")]
    assert "held-out reward after step 10: easy 1.000, hard 0.250" in lines
    assert len(steps) == NUM_STEPS and len(lines) == NUM_STEPS + 3
    assert {len(line) for line in (head, *steps)} == {len(head)} and len(head) <= 110
    assert all({*line.split()[1:]} == NUMBERS for line in steps)


@pytest.mark.parametrize(("width", "num_columns"), [(40, 2), (60, 3), (80, 4), (90, 5), (160, 5)])
def test_the_name_of_a_run_is_whole_in_every_list(width: int, num_columns: int):
    name = "quickstart-20261122-033224"
    runs = [
        pb.Run(name=n, run_dir=f"/home/me/lockstep/runs/{n}", phase="generating", state=pb.RUN_STATE_RUNNING)
        for n in (name, "b")
    ]
    console = make_console(width, 24, is_terminal=False)
    console.print(_runs_table(runs, width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows if row[0]] == [name, "b"]
    assert {len(row) for row in rows} == {num_columns}
    if num_columns == 5:
        assert "".join(row[4] for row in rows) == "".join(run.run_dir for run in runs)


def test_a_name_wider_than_the_terminal_is_folded():
    console = make_console(40, 24, is_terminal=False)
    console.print(_runs_table([pb.Run(name="a" * 70)], 40))
    assert console.file.getvalue().count("a") == 70


@contextlib.contextmanager
def logging_to(console: Console, directory: Path) -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    root.handlers.clear()  # otherwise they would be closed
    try:
        log_to(make_config(runs_dir=directory), console)
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.level, root.handlers[:] = before


def test_a_warning_is_one_line_where_there_is_no_terminal(tmp_path: Path):
    message = "lost replica 127.0.0.1:5: " + "gone " * 40 + "[for good]"
    lines = {}
    for is_terminal in (False, True):
        console = make_console(80, 24, is_terminal=is_terminal)
        with logging_to(console, tmp_path):
            logging.getLogger("test").info("not for the terminal")
            logging.getLogger("test").warning(message)
        lines[is_terminal] = console.file.getvalue().splitlines()
    (line,) = lines[False]
    assert line.endswith(f" WARNING {message}")
    assert len(lines[True]) > 2 and max(map(len, lines[True])) <= 80
    assert (tmp_path / "run" / "logs" / "coordinator.log").read_text().count(message) == 2
