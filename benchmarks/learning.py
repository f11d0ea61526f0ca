"""Runs a config to its end and reads how well the policy did on held-out data, for benchmarks that compare learning."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SEEDS = (0, 1, 2)
Row = dict[str, float]


def metrics(config: str, overrides: Sequence[str]) -> list[Row]:
    """Runs `config` with `overrides` in a temporary directory. Returns its metrics.

    Raises CalledProcessError if the run fails; its output is on stderr.
    """
    with tempfile.TemporaryDirectory() as directory:
        run(config, [*overrides, f"runs_dir={directory}", "name=run"])
        return read_metrics(Path(directory) / "run")


def run(config: str, overrides: Sequence[str]) -> None:
    """Runs `config` with `overrides`."""
    command = [sys.executable, "-m", "services.coordinator", "run", config, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read_metrics(run_dir: Path) -> list[Row]:
    """Returns the metrics of a run, a row for each step or evaluation."""
    return list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))


def accuracies(rows: Sequence[Row]) -> dict[int, float]:
    """Returns the held-out accuracy by step."""
    return {int(row["step"]): row["eval/held-out/reward"] for row in rows if "eval/held-out/reward" in row}
