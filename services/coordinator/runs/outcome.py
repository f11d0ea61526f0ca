"""What a run leaves: the final policy, and what the terminal says of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.coordinator.runs.run import Phase, Run
from services.coordinator.services.clients.trainer import Trainer


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves."""

    directory: Path
    version: int
    num_steps: int
    evaluations: list[dict[str, float]]
    export_path: Path | None


async def finish(run: Run, trainer: Trainer) -> Outcome:
    """Writes the final policy, if the run has come to its end and wants it."""
    directory, export_path = run.config.run_dir, None
    if run.version >= run.num_steps and run.config.checkpoint.export_at_end:
        export_path = (directory / "model").absolute()
        if not run.set_aside_export(export_path):
            with run.phase(Phase.CHECKPOINTING):
                await trainer.export(str(export_path))
            run.record_export(export_path)
    return Outcome(directory, run.version, run.num_steps, run.evaluations(), export_path)


def show(outcome: Outcome, files: Mapping[str, str], console: Console, *, number: str) -> None:
    """Prints the first and the last held-out numbers, formatted as `number`, and what is in which `files`."""
    if outcome.evaluations:
        shown = [outcome.evaluations[0], *outcome.evaluations[1:][-1:]]
        table = Table("held-out", *(f"after step {metrics['version']}" for metrics in shown))
        for name in dict.fromkeys(name for metrics in shown for name in metrics if name != "version"):
            values = (format(metrics[name], number) if name in metrics else "-" for metrics in shown)
            table.add_row(name.removeprefix("eval/"), *values)
        console.print(table)
    lines = [f"  {name:<28} {what}" for name, what in files.items() if outcome.export_path or name != "model/"]
    done = f"{outcome.version} steps done."
    if outcome.version < outcome.num_steps:
        done = f"Stopped: {outcome.version} of {outcome.num_steps} steps done. The same command goes on."
    for line in (f"{done} Files of this run, in {outcome.directory}:", *lines):
        console.print(line, soft_wrap=True, highlight=False)
