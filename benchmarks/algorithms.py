"""Measures how well each algorithm solves the quickstart: its held-out accuracy with several seeds.

`python -m benchmarks.algorithms [NAME ...]` runs the named algorithms, or all, and saves each result as algorithm-NAME.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import keep

_CONFIG = "deploy/runs/quickstart.yaml"
_COMMON = ["num_steps=30", "evaluation.eval_freq=10", "checkpoint.save_freq=0", "checkpoint.export_at_end=false"]
_SEEDS = (0, 1, 2)
# Two updates per batch for losses that differ from the plain one only after the policy has moved.
ALGORITHMS = {
    "grpo": [],
    "ppo": ["advantage.kind=gae", "critic={warmup_steps: 5, optim: {lr: 1.0e-3}}"],
    "rloo": ["advantage.kind=rloo"],
    "gspo": ["trainer.loss.kind=gspo", "trainer.loss.aggregation=seq_mean_token_mean", "trainer.num_minibatches=2"],
    "cispo": ["trainer.loss.kind=cispo", "trainer.num_minibatches=2"],
}


def main() -> None:
    """Runs the algorithms and saves their accuracies."""
    for name in sys.argv[1:] or ALGORITHMS:
        samples: dict[str, list[float]] = {}
        for seed in _SEEDS:
            for version, accuracy in _accuracies([*ALGORITHMS[name], f"seed={seed}"]).items():
                samples.setdefault(f"held-out accuracy after {version} steps, seeds {_SEEDS}", []).append(accuracy)
        keep(
            f"algorithm-{name}",
            samples,
            libraries=("torch", "vllm", "transformers"),
            config=_CONFIG,
            overrides=_COMMON + ALGORITHMS[name],
        )


def _accuracies(overrides: list[str]) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "services.coordinator", "run", _CONFIG, *_COMMON, *overrides]
        subprocess.run([*command, f"runs_dir={directory}"], check=True, stdout=subprocess.DEVNULL)
        lines = (Path(directory) / "quickstart" / "metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return {row["step"]: row["eval/held-out/reward"] for row in rows if "eval/held-out/reward" in row}


if __name__ == "__main__":
    main()
