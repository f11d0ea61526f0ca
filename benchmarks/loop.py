"""Where a step of the quickstart goes, and the share that is none of generate and score, train, publish."""

import asyncio
import json
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.report import keep
from services.common.config.load import load
from services.common.config.run import Config
from services.coordinator.launch import Addresses
from services.coordinator.session import run_session

_STEPS, _WARM_UP = 30, 3
_KEPT = ("time/step_s", "time/generating_s", "time/training_s", "time/publishing_s", "time/outside_share")


def main() -> None:
    """Runs, measures and keeps the result."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"num_steps={_STEPS}", f"runs_dir={directory}", "evaluation.eval_freq=0", "checkpoint.save_freq=0"]
        config = load(Config, ["deploy/runs/quickstart.yaml", *overrides, "evaluation.eval_before_train=false"])
        asyncio.run(run_session(config, Addresses(), Console()))
        lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][_WARM_UP:]
    samples = {name.removeprefix("time/"): [step[name] for step in steps] for name in _KEPT}
    keep("loop", samples, libraries=("torch", "grpcio"), config="deploy/runs/quickstart.yaml", num_steps=_STEPS)


if __name__ == "__main__":
    main()
