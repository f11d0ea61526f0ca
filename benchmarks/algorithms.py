"""Measures how well each algorithm solves the quickstart: its held-out accuracy with several seeds.

`python -m benchmarks.algorithms [NAME ...]` runs the named algorithms, or all, and saves each result as algorithm-NAME.
"""

import sys

from benchmarks.learning import SEEDS, accuracies, metrics
from benchmarks.report import keep

_CONFIG = "deploy/runs/quickstart.yaml"
_COMMON = ["num_steps=30", "evaluation.eval_freq=10", "checkpoint.save_freq=0", "checkpoint.export_at_end=false"]
# Two updates per batch for losses that differ from the plain one only after the policy has moved.
ALGORITHMS = {
    "grpo": [],
    "ppo": ["advantage.kind=gae", "critic={warmup_steps: 5, optim: {lr: 1.0e-3}}"],
    "rloo": ["advantage.kind=rloo"],
    "gspo": ["trainer.loss.kind=gspo", "trainer.loss.aggregation=seq_mean_token_mean", "trainer.num_minibatches=2"],
    "gmpo": ["trainer.loss.kind=gmpo", "trainer.loss.aggregation=seq_mean_token_mean", "trainer.num_minibatches=2"],
    "cispo": ["trainer.loss.kind=cispo", "trainer.num_minibatches=2"],
}


def main() -> None:
    """Runs the algorithms and saves their accuracies."""
    for name in sys.argv[1:] or ALGORITHMS:
        samples: dict[str, list[float]] = {}
        for seed in SEEDS:
            by_step = accuracies(metrics(_CONFIG, [*_COMMON, *ALGORITHMS[name], f"seed={seed}"]))
            for version, accuracy in by_step.items():
                samples.setdefault(f"held-out accuracy after {version} steps, seeds {SEEDS}", []).append(accuracy)
        keep(
            f"algorithm-{name}",
            samples,
            libraries=("torch", "vllm", "transformers"),
            config=_CONFIG,
            overrides=_COMMON + ALGORITHMS[name],
        )


if __name__ == "__main__":
    main()
