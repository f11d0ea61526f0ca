"""Saves the result of a benchmark: date, machine, versions, command, raw samples and medians."""

import datetime
import gzip
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_ENVIRONMENT = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MPS_PIPE_DIRECTORY",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
RESULTS = Path(__file__).parent / "results"


def keep(name: str, samples: Mapping[str, Sequence[float]], *, libraries: Sequence[str], **settings: Any) -> None:
    """Writes `results/<name>.json` and prints medians; `samples` maps `quantity [unit]` to its raw values."""
    medians = {quantity: statistics.median(values) for quantity, values in samples.items()}
    result = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": _gpus(),
        },
        "versions": {"python": platform.python_version(), **{library: version_of(library) for library in libraries}},
        "environment": {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
        "settings": settings,
        "medians": medians,
        "samples": {quantity: list(values) for quantity, values in samples.items()},
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    table = Table("quantity", "median", "samples", title=f"{name}: {path.relative_to(Path.cwd())}")
    for quantity, median in medians.items():
        table.add_row(escape(quantity), f"{median:.4g}", str(len(samples[quantity])))
    Console().print(table)


def keep_trace(name: str, run_dir: Path) -> None:
    """Saves the timeline of a run with `trace: true` as `results/<name>.trace.json.gz`."""
    with (run_dir / "trace.json").open("rb") as trace, gzip.open(RESULTS / f"{name}.trace.json.gz", "wb") as kept:
        shutil.copyfileobj(trace, kept)


def version_of(library: str) -> str:
    """Returns the version of the distribution that provides the module, which may have another name."""
    return version(packages_distributions().get(library.replace("-", "_"), [library])[0])


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
