"""Measures a real model on CPU: SmolLM2-135M-Instruct, on the recipe deploy/runs/smollm2.yaml.

`python -m benchmarks.real_model [NAME] [key=value ...]` saves the result as NAME. The recipe says how to make its model
and data.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.learning import accuracies, read_metrics
from benchmarks.loop import kept
from benchmarks.report import keep

_CONFIG = "deploy/runs/smollm2.yaml"
_COMMON = ["checkpoint.save_freq=0", "checkpoint.export_at_end=false"]
_LOOK_S = 1.0


def main() -> None:
    """Runs the recipe, and saves its times, its curve and the services' memory."""
    name, *overrides = sys.argv[1:] or ["real-model-cpu"]
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "services.coordinator", "run", _CONFIG, *_COMMON, *overrides]
        begin = time.monotonic()
        process = subprocess.Popen([*command, f"runs_dir={directory}", "name=run"], stdout=subprocess.DEVNULL)
        samples = {f"peak memory of the {name} service [GiB]": [peak] for name, peak in peaks(process).items()}
        samples["whole run, with starting the services [s]"] = [time.monotonic() - begin]
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        lines = read_metrics(Path(directory) / "run")
    steps = [line for line in lines if "time/step_s" in line]
    samples |= kept(steps)
    for step, accuracy in accuracies(lines).items():
        samples[f"held-out reward after {step} steps"] = [accuracy]
    keep(
        name,
        samples,
        libraries=("torch", "vllm", "transformers"),
        config=_CONFIG,
        overrides=_COMMON + overrides,
        note="other programs ran on the same cores; load averages of 1, 5 and 15 minutes",
        load_before=load_before,
        load_after=os.getloadavg(),
    )


def peaks(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Waits until the run ends. Returns the largest resident set of the processes of each service."""
    found: dict[str, float] = {}
    while True:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            with suppress(psutil.Error, OSError):  # it has just ended
                _add_peak(found, child.cmdline(), Path(f"/proc/{child.pid}/status").read_text())
        try:
            process.wait(_LOOK_S)
            return found
        except subprocess.TimeoutExpired:
            continue


def _add_peak(found: dict[str, float], words: list[str], status: str) -> None:
    for service in ("trainer", "rollout", "reward"):
        if f"services.{service}" in words and "VmHWM:" in status:
            kib = int(status.split("VmHWM:")[1].split()[0])
            found[service] = max(found.get(service, 0.0), kib / 2**20)


if __name__ == "__main__":
    main()
