"""Measures the phases of a quickstart step, and the share outside generating, scoring, training and publishing.

`python -m benchmarks.loop [NAME] [key=value ...]` saves the result as NAME. On a GPU host each service gets one GPU.
"""

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.learning import read_metrics
from benchmarks.report import keep
from services.common.config.load import load
from services.common.config.run import Config
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.frontend import TerminalFrontend
from services.coordinator.rl.session import run_session
from services.coordinator.runs.clock import LANES

_CONFIG = "deploy/runs/quickstart.yaml"
_WARM_UP = 3
KEPT = {
    "time/step_s": "step [s]",
    "time/generating_s": "generate and score [s]",
    "time/training_s": "train [s]",
    "time/publishing_s": "publish [s]",
    "time/generate_busy_s": "replicas generate [s]",
    "time/score_busy_s": "reward services score [s]",
    "time/train_busy_s": "trainer trains [s]",
    "time/publish_busy_s": "weights are sent [s]",
    "time/idle_rollout_s": "replicas do not generate [s]",
    "time/idle_trainer_s": "trainer does not train [s]",
    "time/outside_share": "outside these [share of step]",
    "train/logprob_diff_mean": "engine-trainer difference, mean [nats]",
    "train/logprob_diff_max": "engine-trainer difference, max [nats]",
    "train/moe_router_agreement": "experts of the engine that the trainer's routers choose [share]",
    "lag/ess": "effective sample size [share of tokens]",
    "reward/mean": "training reward",
    "teacher_kl/token_mean": "divergence from the teacher at the sampled token [nats]",
    "train/distill_kl": "divergence from the teacher over its top k [nats]",
}


_WIDTH = 44  # with name and seconds, a line of 80 columns


def drawing(row: Mapping[str, float]) -> str:
    """Returns the lanes of a step as text, one line each: busy from the first call to the last, and its idle time."""
    step_s = row["time/step_s"]
    lines = [f"{'':>10}0 s{f'{step_s:.1f} s':>{_WIDTH - 3}}"]
    for name in (name for name in LANES if f"time/{name}_end_s" in row):
        begin_s, end_s, busy_s = (row[f"time/{name}_{part}_s"] for part in ("begin", "end", "busy"))
        begin, end = (round(at / step_s * _WIDTH) for at in (begin_s, end_s))
        begin = min(begin, _WIDTH - 1)
        bar = " " * begin + "#" * max(1, end - begin)
        lines.append(f"{name:>9} {bar:<{_WIDTH}} busy {busy_s:.1f} s, idle {step_s - busy_s:.1f} s")
    return "\n".join(lines)


def measure(name: str, overrides: list[str], directory: Path, **settings: Any) -> Path:
    """Runs the quickstart with `overrides` in `directory`, saves its step times, and returns the run's directory."""
    run_dir, samples = run(overrides, directory)
    save(name, samples, overrides, **settings)
    return run_dir


def run(overrides: list[str], directory: Path) -> tuple[Path, dict[str, list[float]]]:
    """Runs the quickstart with `overrides` in `directory`. Draws the lanes of its last step.

    Returns the run's directory and its raw samples.
    """
    config = load(Config, [_CONFIG, *overrides, f"runs_dir={directory}"])
    outcome = asyncio.run(run_session(config, Addresses(), TerminalFrontend(Console())))
    steps = [line for line in read_metrics(config.run_dir) if "time/step_s" in line]
    whole = [step for step in steps if "time/generate_busy_s" in step]  # with a lag, the last ones generate nothing
    warm = whole[min(_WARM_UP, len(whole) - 1) :]  # at least one step, if the run was interrupted
    samples = kept(warm)
    samples["training reward"] = [step["reward/mean"] for step in steps]
    for evaluation in outcome.evaluations:
        samples[f"held-out reward after {evaluation['version']} steps"] = [evaluation["eval/held-out/reward"]]
    Console().print(drawing(warm[-1]), highlight=False)
    return config.run_dir, samples


def kept(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Returns the values of KEPT that all `steps` have, by label."""
    return {label: [step[key] for step in steps] for key, label in KEPT.items() if all(key in step for step in steps)}


def save(name: str, samples: dict[str, list[float]], overrides: list[str], **settings: Any) -> None:
    """Saves `samples` of runs with `overrides`."""
    libraries = ("torch", "grpcio", "transformers")
    keep(name, samples, libraries=libraries, config=_CONFIG, overrides=overrides, **settings)


def main() -> None:
    """Runs the quickstart, measures, and saves the result."""
    name, *overrides = sys.argv[1:] or ["loop"]
    with tempfile.TemporaryDirectory() as directory:
        measure(name, ["checkpoint.save_freq=0", *overrides], Path(directory))


if __name__ == "__main__":
    main()
