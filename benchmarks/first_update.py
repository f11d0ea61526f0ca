"""Measures how long a user waits: from the command to the first applied update, with the seconds of each stage.

Run `python -m benchmarks.first_update NAME [--shape SHAPE] [--repeats N] [key=value ...]` for the quickstart with
these changes. SHAPE, one of benchmarks.megatron_layouts.MODELS, trains a random model of that size in place of the
quickstart's. The first of the runs finds the caches of vLLM and torch as they are on this host, and the others warm.
"""

import argparse
import asyncio
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep
from benchmarks.step import TOKENIZER

_CONFIG = "deploy/runs/quickstart.yaml"
_STAGE = re.compile(r"  ([\w-]+: .+), ([\d.]+) s$")
_FIRST_STEP = re.compile(r" +1/\d+ ")
_RUN_S = 900.0


async def first_update_s(overrides: list[str], samples: dict[str, list[float]]) -> None:
    """Runs until the first step's line is printed, and adds its time and those of the stages before to `samples`."""
    command = [sys.executable, "-m", "services.coordinator", "run", _CONFIG, *overrides]
    begin = time.perf_counter()
    run = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert run.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(_RUN_S):
            async for line in run.stdout:
                said += line
                if stage := _STAGE.match(line.decode()):
                    samples[f"{stage[1]} [s]"].append(float(stage[2]))
                if _FIRST_STEP.match(line.decode()):
                    samples["first update [s]"].append(time.perf_counter() - begin)
                    break
            else:
                raise RuntimeError(f"the run ended before its first step:\n{said.decode()[-3000:]}")
    finally:
        if run.returncode is None:
            # Two signals end it at once, without a checkpoint.
            run.send_signal(signal.SIGTERM)
            run.send_signal(signal.SIGINT)
        await run.communicate()


def main() -> None:
    """Makes the model, if it has a shape, and runs the config `--repeats` times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_update")
    parser.add_argument("name")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--shape", default="")
    parser.add_argument("--repeats", type=int, default=3)
    add_options(parser)
    options = parser.parse_intermixed_args()
    samples: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        overrides = [
            "num_steps=3",
            "evaluation.eval_before_train=false",
            "checkpoint.save_freq=0",
            "checkpoint.export_at_end=false",
            f"runs_dir={name}/runs",
            *options.overrides,
        ]
        if options.shape:
            model = make_random_model(Path(name), options.shape, options)
            for file in TOKENIZER:
                shutil.copy(Path("deploy/quickstart/model") / file, model)
            overrides.append(f"model={model}")
        for repeat in range(options.repeats):
            asyncio.run(first_update_s([f"name=run-{repeat}", *overrides], samples))
    libraries = ("torch", "vllm", "transformers")
    keep(
        options.name,
        dict(samples),
        libraries=libraries,
        shape=options.shape or "quickstart",
        overrides=options.overrides,
    )


if __name__ == "__main__":
    main()
