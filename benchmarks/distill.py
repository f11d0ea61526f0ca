"""Compares on-policy distillation with GRPO: the steps until the quickstart's model is right about 0.98 of the held-out
sums, with several seeds.

`python -m benchmarks.distill` trains a teacher with GRPO, then students with GRPO and from the teacher. All start from
the quickstart's model, see the same prompts, and generate as many samples in a step. Saves distill-quickstart.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import keep

_GOAL = 0.98
_SEEDS = (0, 1, 2)
_CONFIG = "deploy/runs/quickstart.yaml"
_EVERY = ["evaluation.eval_freq=2", "checkpoint.save_freq=0"]
_TEACHER = ["seed=100", "num_steps=120", "evaluation.eval_freq=20", "checkpoint.save_freq=0"]
_GRPO = [*_EVERY, "num_steps=80", "checkpoint.export_at_end=false"]
_DISTILL = [*_EVERY, "num_steps=30", "checkpoint.export_at_end=false"]


def main() -> None:
    """Runs everything and saves the steps to the goal, and the accuracy at every evaluation."""
    with tempfile.TemporaryDirectory() as directory:
        runs = Path(directory)
        of_teacher = _accuracies(runs, "teacher", _CONFIG, _TEACHER)
        kinds = {
            "GRPO": (_CONFIG, _GRPO),
            "distillation": ("deploy/runs/distill.yaml", [*_DISTILL, f"teacher.model={runs / 'teacher' / 'model'}"]),
        }
        samples = {"held-out accuracy of the teacher [step 120]": [of_teacher[max(of_teacher)]]}
        for kind, (config, overrides) in kinds.items():
            reached: list[float] = []
            for seed in _SEEDS:
                accuracies = _accuracies(runs, f"{kind}-{seed}", config, [*overrides, f"seed={seed}"])
                samples[f"{kind}, seed {seed}: held-out accuracy [every 2 steps]"] = list(accuracies.values())
                reached.append(next((step for step, value in accuracies.items() if value >= _GOAL), float("inf")))
            samples[f"{kind}: first evaluated step of {_GOAL} or more [step], seeds {_SEEDS}"] = reached
    settings = {"teacher": [_CONFIG, *_TEACHER], "GRPO": [_CONFIG, *_GRPO]}
    settings["distillation"] = ["deploy/runs/distill.yaml", *_DISTILL]
    keep("distill-quickstart", samples, libraries=("torch", "vllm", "transformers"), **settings)


def _accuracies(runs: Path, name: str, config: str, overrides: list[str]) -> dict[int, float]:
    """Returns the held-out accuracy of a run by step."""
    command = [sys.executable, "-m", "services.coordinator", "run", config, *overrides]
    subprocess.run([*command, f"runs_dir={runs}", f"name={name}"], check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval/held-out/reward"] for row in rows if "eval/held-out/reward" in row}


if __name__ == "__main__":
    main()
