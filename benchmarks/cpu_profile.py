"""Profiles a trainer rank on CPU: seconds of each phase, and of its operators, and peak memory.

Run `python -m benchmarks.cpu_profile NAME MODEL [--samples N] [--lengths PROMPT COMPLETION] [--max-tokens N]
[--strategy S]`, where MODEL is a model directory (deploy/quickstart/smollm2.py makes one) or a shape of
benchmarks.megatron_layouts.MODELS, which gets random weights. One rank has all cores, as `lockstep run` gives them.

The phases are those of benchmarks.memory_rank; a publication has no receiver here (benchmarks.sync measures it with
real engines). The first update also allocates the optimizer's state, so its seconds are separate. Seconds of operators
are those of the last repeat, which the profiler slows down a little. Operators with the size of the vocabulary in one
of their inputs are counted separately. CPU time is that of all threads; on a busy machine it says more than seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.random_model import make_random_model
from benchmarks.report import keep

REPEATS = 3


def main() -> None:
    """Profiles a rank in a process of its own, so that its memory is that of a rank, and saves the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_profile")
    parser.add_argument("name")
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs=2, default=[48, 40], metavar=("PROMPT", "COMPLETION"))
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--strategy", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--tiny", action="store_true", help="make a small model of the shape")
    options = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if Path(options.model).is_dir():
            (directory / "model").symlink_to(Path(options.model).absolute())
        else:
            shape = argparse.Namespace(tiny=options.tiny, models=None)
            make_random_model(directory / "made", options.model, shape).rename(directory / "model")
        case = _case(options)
        (directory / "case.json").write_text(json.dumps(case))
        subprocess.run([sys.executable, "-m", "benchmarks.cpu_profile_rank", temporary], check=True)
        measured = json.loads((directory / "profile.json").read_text())
    loads = {"load_before": before, "load_after": os.getloadavg()}
    keep(options.name, measured, libraries=("torch", "transformers", "megatron-core"), case=case, **loads)


def _case(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "trainer": {
            "strategy": options.strategy,
            "max_tokens_per_microbatch": options.max_tokens,
            "max_logprob_diff": 1e9,
            "compute_dtype": "float32",
        },
        "data_ranks": 1,
        "samples": options.samples,
        "prompt_tokens": options.lengths[0],
        "completion_tokens": options.lengths[1],
        "bucket_bytes": 64 << 20,
        "repeats": REPEATS,
    }


if __name__ == "__main__":
    main()
