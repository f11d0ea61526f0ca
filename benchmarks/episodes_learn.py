"""Measures how the quickstart's model improves in episodes of several turns (deploy/runs/tries.yaml).

`lockstep data arithmetic && python -m benchmarks.episodes_learn NAME [key=value ...]` saves the curves as NAME.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import keep

_CONFIG = "deploy/runs/tries.yaml"
_COMMON = ["checkpoint.save_freq=0", "checkpoint.export_at_end=false"]
_KEPT = {
    "reward/mean": "training reward",
    "episode/turns_mean": "turns of an episode",
    "train/logprob_gap_max": "engine-trainer gap, max [nats]",
    "time/step_s": "step [s]",
}


def main() -> None:
    """Runs the recipe, and saves its curves."""
    name, *overrides = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "services.coordinator", "run", _CONFIG, *_COMMON, *overrides]
        begin = time.monotonic()
        subprocess.run([*command, f"runs_dir={directory}", "name=run"], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begin
        lines = list(map(json.loads, (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()))
    steps = [line for line in lines if "reward/mean" in line]
    samples = {label: [step[key] for step in steps] for key, label in _KEPT.items()}
    for line in lines:
        if "eval/held-out/reward" in line:
            samples[f"held-out reward after {line['step']} steps"] = [line["eval/held-out/reward"]]
    samples["whole run, with starting the services [s]"] = [seconds]
    libraries = ("torch", "vllm", "transformers")
    keep(name, samples, libraries=libraries, config=_CONFIG, overrides=_COMMON + overrides, note="the machine was busy")


if __name__ == "__main__":
    main()
