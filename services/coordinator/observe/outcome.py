"""Holds the result of a run, and prints its summary in the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.common.counted import counted


@dataclass(frozen=True)
class Outcome:
    """Holds the result of a run that finished or was stopped."""

    directory: Path
    version: int
    num_steps: int
    evaluations: list[dict[str, float]]
    export_path: Path | None
    best: Mapping[str, float] | None = None
    """Metrics and version of the best saved step, if `checkpoint.keep_best` is set."""


def show(outcome: Outcome, files: Mapping[str, str], console: Console, *, number: str) -> None:
    """Prints the first and last held-out metrics, formatted as `number`, and the run's `files` with their contents."""
    if outcome.evaluations:
        shown = [outcome.evaluations[0], *outcome.evaluations[1:][-1:]]
        table = Table("held-out", *(f"after step {metrics['version']}" for metrics in shown))
        for name in dict.fromkeys(name for metrics in shown for name in metrics if name != "version"):
            values = (format(metrics[name], number) if name in metrics else "-" for metrics in shown)
            table.add_row(name.removeprefix("eval/"), *values)
        console.print(table)
    lines = [f"  {name:<28} {what}" for name, what in files.items() if outcome.export_path or name != "model/"]
    done = f"{counted(outcome.version, 'step')} done."
    if outcome.version < outcome.num_steps:
        so_far = f"{outcome.version} of {counted(outcome.num_steps, 'step')} done"
        done = f"Stopped: {so_far}. Run the same command again to resume."
    if outcome.best:
        name = f"checkpoints/step-{outcome.best['version']:06d}"
        lines.append(f"  {name:<28} the best checkpoint, by checkpoint.keep_best")
    for line in (f"{done} Files in {outcome.directory}:", *lines):
        console.print(line, soft_wrap=True, highlight=False)
