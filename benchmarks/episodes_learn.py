"""Measures how a small model improves in episodes of several turns.

`python -m benchmarks.episodes_learn NAME [CONFIG] [key=value ...]` saves the curves as NAME. CONFIG is one of
deploy/runs: tries.yaml (the default), lookup.yaml or search.yaml; its first lines say how to make its model and data.
"""

import os
import resource
import sys
import time

from benchmarks.learning import accuracies, metrics
from benchmarks.report import keep

_CONFIG = "deploy/runs/tries.yaml"
_COMMON = ["checkpoint.save_freq=0", "checkpoint.export_at_end=false"]
_KEPT = {
    "reward/mean": "training reward",
    "episode/turns_mean": "turns of an episode",
    "train/logprob_diff_max": "engine-trainer difference, max [nats]",
    "time/step_s": "step [s]",
}


def main() -> None:
    """Runs the recipe, and saves its curves."""
    name, *overrides = sys.argv[1:]
    config = overrides.pop(0) if overrides and "=" not in overrides[0] else _CONFIG
    load_before = os.getloadavg()
    begin = time.monotonic()
    lines = metrics(config, [*_COMMON, *overrides])
    seconds = time.monotonic() - begin
    steps = [line for line in lines if "reward/mean" in line]
    samples = {label: [step[key] for step in steps] for key, label in _KEPT.items()}
    for step, accuracy in accuracies(lines).items():
        samples[f"held-out reward after {step} steps"] = [accuracy]
    samples["whole run, with starting the services [s]"] = [seconds]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    samples["processor time of the whole run [s]"] = [spent.ru_utime + spent.ru_stime]
    libraries = ("torch", "vllm", "transformers")
    keep(
        name,
        samples,
        libraries=libraries,
        config=config,
        overrides=_COMMON + overrides,
        note="other programs ran on the same cores; load averages of 1, 5 and 15 minutes",
        load_before=load_before,
        load_after=os.getloadavg(),
    )


if __name__ == "__main__":
    main()
