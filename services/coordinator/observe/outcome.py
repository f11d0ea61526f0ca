"""Holds the result of a run, and prints its summary in the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Table

from services.common.config.reading.load import AnyConfig
from services.common.counted import counted
from services.coordinator.runs.run import Run
from services.coordinator.runs.scorer_change import change_between


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
    other_scorers: str = ""
    """How the scorers or the environment of the last evaluation differ from those of the first."""

    @classmethod
    def of(cls, run: Run[AnyConfig], version: int, num_steps: int, export_path: Path | None) -> Self:
        """Returns the outcome of a run that ended after step `version` of `num_steps`, from its record."""
        evaluations, change = run.record.evaluations(), ""
        if evaluations:
            shown = (int(evaluations[at]["version"]) for at in (0, -1))
            change = change_between(run.record.ledger, *shown)
        return cls(run.config.run_dir, version, num_steps, evaluations, export_path, run.checkpoints.best(), change)


def show(outcome: Outcome, files: Mapping[str, str], console: Console, *, number: str) -> None:
    """Prints the first and last held-out metrics, formatted as `number`, and the run's `files` with their contents."""
    if outcome.evaluations:
        shown = [outcome.evaluations[0], *outcome.evaluations[1:][-1:]]
        table = Table("held-out", *(f"after step {metrics['version']}" for metrics in shown))
        for name in dict.fromkeys(name for metrics in shown for name in metrics if name != "version"):
            values = (format(metrics[name], number) if name in metrics else "-" for metrics in shown)
            table.add_row(name.removeprefix("eval/"), *values)
        console.print(table)
    if outcome.other_scorers:
        what = f"These columns cannot be compared, they were scored differently: {outcome.other_scorers}."
        console.print(what, style="bold", soft_wrap=True)
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
