"""Measures how many steps the quickstart's model needs to be right about 0.98 of the held-out sums, with several seeds:
from a teacher, or with GRPO. Both see the same data and generate as many samples in a step.

`python -m benchmarks.distill grpo` saves distill-grpo. `python -m benchmarks.distill teacher DIR` trains a teacher in
DIR with GRPO, and `python -m benchmarks.distill students DIR` distills from it and saves distill-quickstart.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import keep

_GOAL = 0.98
_SEEDS = (0, 1, 2)
_QUICKSTART, _DISTILL = "deploy/runs/quickstart.yaml", "deploy/runs/distill.yaml"
_TEACHER = ["name=teacher", "seed=100", "num_steps=120", "evaluation.eval_freq=20", "checkpoint.save_freq=0"]
_COMMON = ["evaluation.eval_freq=5", "checkpoint.save_freq=0", "checkpoint.export_at_end=false"]


def main() -> None:
    """Does what the command line names."""
    what, *rest = sys.argv[1:]
    if what == "teacher":
        _run(_QUICKSTART, [*_TEACHER, f"runs_dir={rest[0]}"])
    elif what == "grpo":
        _measure("distill-grpo", _QUICKSTART, _COMMON)
    else:
        teacher = Path(rest[0]) / "teacher"
        *_, (step, accuracy) = _accuracies(teacher).items()
        of_teacher = {f"held-out accuracy of the teacher after {step} steps": [accuracy]}
        _measure("distill-quickstart", _DISTILL, [*_COMMON, f"teacher.model={teacher / 'model'}"], of_teacher)


def _measure(name: str, config: str, overrides: list[str], also: dict[str, list[float]] | None = None) -> None:
    """Runs every seed, and saves the accuracies and the first evaluated step of the goal, where it was reached."""
    samples, reached = dict(also or {}), list[float]()
    for seed in _SEEDS:
        with tempfile.TemporaryDirectory() as directory:
            _run(config, [*overrides, f"seed={seed}", f"runs_dir={directory}", "name=run"])
            accuracies = _accuracies(Path(directory) / "run")
        samples[f"held-out accuracy every 5 steps, seed {seed}"] = list(accuracies.values())
        reached += [step for step, accuracy in accuracies.items() if accuracy >= _GOAL][:1]
    samples[f"first evaluated step of {_GOAL} or more, seeds {_SEEDS}"] = reached
    keep(name, samples, libraries=("torch", "vllm", "transformers"), config=config, overrides=overrides)


def _run(config: str, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "services.coordinator", "run", config, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _accuracies(run_dir: Path) -> dict[int, float]:
    """Returns the held-out accuracy of a run by step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval/held-out/reward"] for row in rows if "eval/held-out/reward" in row}


if __name__ == "__main__":
    main()
