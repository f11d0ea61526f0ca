"""Tests `lockstep report` of several runs."""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rich.console import Console

from services.common.errors import NotFound
from services.common.json_values import JsonObject
from services.coordinator.observe.console import literal_console
from services.coordinator.observe.report.summary import show_comparison
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from tests.coordinator.observe.test_report import files, run_dir
from tests.support import raises

__all__ = ["run_dir"]


def change_config(run_dir: Path, change: Callable[[JsonObject], object]) -> None:
    """Records that the run was opened with a changed config."""
    with closing(Ledger(run_dir / LEDGER)) as ledger:
        opened = ledger.last(Kind.OPENED)
        assert opened
        config = json.loads(opened["config"])
        change(config)
        ledger.record(Kind.OPENED, **(opened | {"config": json.dumps(config)}))


def test_runs_are_compared_in_a_table(run_dir: Path, tmp_path: Path):
    other = shutil.copytree(run_dir, tmp_path / "other")
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()[:-1]]
    rows = [{**row, "time/step_s": 8192.5} if "time/step_s" in row else row for row in rows]
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    change_config(other, lambda config: (config.update(name="other"), config["trainer"]["optim"].update(lr=0.125)))
    before = files(run_dir)
    console = Console(file=io.StringIO(), width=120, color_system=None)
    show_comparison([run_dir, other, tmp_path / "other"], console)
    assert files(run_dir) == before
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines()]
    shown = {row[0]: row[1:] for row in cells if row}
    assert shown["steps"] == ["3 of 3", "2 of 3", "2 of 3"]
    assert [shown["trainer.optim.lr"][index] for index in (1, 2)] == ["0.125", "0.125"]
    assert not {"name", "runs_dir"} & shown.keys()
    assert shown["median step s"] == ["4", "8,192", "8,192"]
    assert shown["median tokens/s"] == ["200,000", "150,000", "150,000"]
    assert shown["reward"][0].endswith("0.51 → 0.53") and shown["reward"][1].endswith("0.51 → 0.52")
    assert "█" in shown["reward"][0] and "█" not in shown["reward"][1]  # the axes are common
    assert shown["last test/reward"] == ["0.25 (step 0)"] * 3


def test_long_keys_are_whole_in_a_narrow_terminal(run_dir: Path, tmp_path: Path):
    other = shutil.copytree(run_dir, tmp_path / "other")
    keys = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    change_config(other, lambda config: config["trainer"]["megatron"].update(dict.fromkeys(keys, 2)))
    console = Console(file=io.StringIO(), width=80, color_system=None)
    show_comparison([run_dir, other, other], console)
    table = console.file.getvalue().splitlines()[:-1]
    assert max(map(len, table)) <= 80
    names = "".join(line.split("│")[1].strip() for line in table if "│" in line)
    assert [key for key in keys if f"trainer.megatron.{key}" not in names] == []


def test_values_that_differ_are_shown_as_far_as_they_do(run_dir: Path, tmp_path: Path):
    pattern = "[/b]" + 50 * "[a-z]"
    others = [shutil.copytree(run_dir, tmp_path / name) for name in ("x", "y")]
    for other in others:
        scorer = {"kind": "format", "pattern": f"{pattern}{other.name}"}
        change_config(other, lambda config, scorer=scorer: config["reward"].update(scorers=[scorer]))
    console = literal_console(file=io.StringIO(), width=900, color_system=None)
    show_comparison(others, console)
    assert all(f"{pattern}{other.name}" in console.file.getvalue() for other in others)


def test_a_long_error_does_not_fill_the_table(run_dir: Path, tmp_path: Path):
    other = shutil.copytree(run_dir, tmp_path / "other")
    with closing(Ledger(other / LEDGER)) as ledger:
        ledger.record(Kind.FAILED, 3, reason="LOGPROB_DIFF", message="too far " * 30)
    console = Console(file=io.StringIO(), width=120, color_system=None)
    show_comparison([run_dir, other], console)
    assert "LOGPROB_DIFF: too far too far too far t…" in console.file.getvalue()


def test_a_comparison_with_no_run_says_so(run_dir: Path, tmp_path: Path):
    with raises(NotFound, field="run_dir"):
        show_comparison([run_dir, tmp_path], Console(file=io.StringIO()))
