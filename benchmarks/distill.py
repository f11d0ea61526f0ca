"""Measures how many steps the quickstart's model needs to be right about 0.98 of the held-out sums, with several seeds:
from a teacher, or with GRPO. Both see the same data and generate as many samples in a step.

`python -m benchmarks.distill grpo` saves distill-grpo. `python -m benchmarks.distill teacher DIR` trains a teacher in
DIR with GRPO, and `python -m benchmarks.distill students DIR` distills from it and saves distill-quickstart;
`python -m benchmarks.distill top_k DIR` compares the teacher's 8 most probable tokens and saves distill-top-k.
"""

import sys
from pathlib import Path

from benchmarks.learning import SEEDS, accuracies, metrics, read_metrics, run
from benchmarks.report import keep

_GOAL = 0.98
_QUICKSTART, _DISTILL = "deploy/runs/quickstart.yaml", "deploy/runs/distill.yaml"
_TEACHER = ["name=teacher", "seed=100", "num_steps=120", "evaluation.eval_freq=20", "checkpoint.save_freq=0"]
_TOP_K = ["advantage.distill_coef=0", "trainer.loss.distill={coef: 1, top_k: 8}"]
_COMMON = ["evaluation.eval_freq=5", "checkpoint.save_freq=0", "checkpoint.export_at_end=false"]


def main() -> None:
    """Does what the command line names."""
    what, *rest = sys.argv[1:]
    if what == "teacher":
        run(_QUICKSTART, [*_TEACHER, f"runs_dir={rest[0]}"])
    elif what == "grpo":
        _measure("distill-grpo", _QUICKSTART, _COMMON)
    else:
        teacher = Path(rest[0]) / "teacher"
        *_, (step, accuracy) = accuracies(read_metrics(teacher)).items()
        of_teacher = {f"held-out accuracy of the teacher after {step} steps": [accuracy]}
        name, keys = ("distill-top-k", _TOP_K) if what == "top_k" else ("distill-quickstart", [])
        _measure(name, _DISTILL, [*_COMMON, *keys, f"teacher.model={teacher / 'model'}"], of_teacher)


def _measure(name: str, config: str, overrides: list[str], also: dict[str, list[float]] | None = None) -> None:
    """Runs every seed, and saves the accuracies and the first evaluated step of the goal, where it was reached."""
    samples, reached = dict(also or {}), list[float]()
    for seed in SEEDS:
        by_step = accuracies(metrics(config, [*overrides, f"seed={seed}"]))
        samples[f"held-out accuracy every 5 steps, seed {seed}"] = list(by_step.values())
        reached += [step for step, accuracy in by_step.items() if accuracy >= _GOAL][:1]
    samples[f"first evaluated step of {_GOAL} or more, seeds {SEEDS}"] = reached
    keep(name, samples, libraries=("torch", "vllm", "transformers"), config=config, overrides=overrides)


if __name__ == "__main__":
    main()
