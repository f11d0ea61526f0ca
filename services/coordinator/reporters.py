"""Where a run's numbers go: the terminal, metrics.jsonl, TensorBoard."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from services.coordinator.clients.rollout import Rollout

_ROWS = 12


class Reporter:
    """Hears of every phase, step and evaluation, and does nothing about what it does not care for."""

    def watch(self, rollout: "Rollout") -> None:
        """The run's replicas, which are about to be opened."""

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        """The run does something else now, for as long as the answer is entered."""
        return nullcontext()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        """A step is finished; `version` counts them from 1."""

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        """The weights of `version` were evaluated."""

    def close(self) -> None:
        """The run is over."""


class JsonLines(Reporter):
    """One JSON object per step or evaluation. Derived from the ledger: a resumed run drops what it will do again."""

    def __init__(self, path: Path, version: int):
        # A crash may have torn the last line, of a step that will be done again or is in the ledger.
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in whole if json.loads(line)["step"] <= version))
        partial.rename(path)
        self._file = path.open("a", buffering=1)

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": version, **metrics}) + "\n")

    evaluation = step

    def close(self) -> None:
        self._file.close()


class TensorBoard(Reporter):
    """Event files that TensorBoard reads."""

    def __init__(self, directory: Path, version: int):
        from tensorboardX import SummaryWriter  # loads torch, where that is installed: seconds

        self._writer = SummaryWriter(str(directory), purge_step=version + 1)

    def step(self, version: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, version)

    evaluation = step

    def close(self) -> None:
        self._writer.close()


class Terminal(Reporter):
    """A live table of the last steps; one line per step where the output is no terminal."""

    def __init__(self, console: Console, num_steps: int):
        self._console, self._num_steps = console, num_steps
        self._rows: list[list[str]] = []
        self._phase = ""
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=False)
        if console.is_terminal:
            self._live.start()
        else:
            console.print("  ".join(f"{name:>9}" for name in _NAMES), style="bold", soft_wrap=True)

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        self._phase = f"step {version + 1} of {self._num_steps}: {name}" if version < self._num_steps else name
        return nullcontext()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        row = [str(version), "", *(show(metrics) for show in _COLUMNS.values())]
        self._rows = [*self._rows[1 - _ROWS :], row]
        if not self._console.is_terminal:
            self._console.print("  ".join(f"{cell:>9}" for cell in row), soft_wrap=True)

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        rewards = [value for name, value in metrics.items() if name.endswith("/reward")]
        shown = " ".join(f"{value:.3f}" for value in rewards)
        if self._rows:
            self._rows[-1][1] = shown
        self._console.print(f"held-out reward after step {version}: {shown}")

    def close(self) -> None:
        self._phase = ""
        if self._console.is_terminal:
            self._live.stop()

    def _table(self) -> Table:
        table = Table(caption=self._phase, caption_justify="left", expand=False)
        for name in _NAMES:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table


_COLUMNS = {
    "reward": lambda m: f"{m['reward/mean']:.3f}",
    "mixed": lambda m: f"{m['reward/mixed_groups']:.2f}",
    "tokens": lambda m: f"{m['batch/tokens']:.0f}",
    "entropy": lambda m: f"{m['train/entropy']:.3f}",
    "grad norm": lambda m: f"{m['train/grad_norm']:.3f}",
    "gap max": lambda m: f"{m['train/logprob_gap_max']:.1e}",
    "generate": lambda m: f"{m['time/generating_s']:.2f} s",
    "train": lambda m: f"{m['time/training_s']:.2f} s",
    "publish": lambda m: f"{m['time/publishing_s']:.2f} s",
}
_NAMES = ("step", "held-out", *_COLUMNS)
