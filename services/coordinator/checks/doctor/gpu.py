"""Checks this host's NVIDIA driver and compiler, and whether its GPUs have the memory that a run will take."""

import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.common.config.run import Config
from services.common.errors import LockstepError
from services.common.families.architecture import read_architecture, read_content
from services.common.families.registry import FAMILIES
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.checks.memory import colocated_phases, rank_memory, utilization
from services.coordinator.checks.nvidia import Gpu, read_gpus
from services.coordinator.services.gpus import visible_gpus
from services.coordinator.services.launch import Addresses

_GIB = 2**30
# The oldest driver for each major version of CUDA (NVIDIA's table of minor-version compatibility).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def examine_gpus(config: Config | None, given: Addresses, driver: str, cuda: str | None) -> Iterator[Finding]:
    """Runs the checks; yields nothing on a host without GPUs. `cuda` is the version that torch was built for."""
    if not visible_gpus():
        return
    yield check_driver(driver, cuda)
    yield check_compiler(Path(sysconfig.get_path("include")))
    if config is None or given.trainer or given.rollout or not (Path(config.model) / "config.json").is_file():
        return
    try:
        if read_content(config.model).get("model_type") in FAMILIES:
            yield check_memory(config, read_gpus())
        else:
            fix = "watch nvidia-smi during the first steps"
            yield Finding("GPU memory", "not estimated for this family of models", Verdict.WARN, fix)
    except LockstepError as error:
        yield Finding("GPU memory", "unknown", Verdict.FAIL, error.message)


def check_driver(driver: str, cuda: str | None) -> Finding:
    """Checks that the driver is new enough for the CUDA that torch was built for."""
    if not driver:
        fix = "install NVIDIA's driver, or start the container with its GPU runtime (docker run --gpus all)"
        return Finding("driver", "not loaded", Verdict.FAIL, fix)
    oldest = _OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    if oldest and int(driver.partition(".")[0]) < oldest:
        fix = f"install driver {oldest} or newer, or a build of torch for an older CUDA"
        return Finding("driver", f"{driver}, too old for CUDA {cuda}", Verdict.FAIL, fix)
    return Finding("driver", f"{driver}, CUDA {cuda}" if cuda else driver)


def check_compiler(headers: Path) -> Finding:
    """Checks that Triton can compile the code that launches kernels; `headers` is the directory of Python's."""
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        found = f"CC={named} not found" if named else "neither gcc nor clang found"
        return Finding("compiler", found, Verdict.FAIL, "install gcc; Triton needs it at a kernel's first use")
    if not (headers / "Python.h").is_file():
        fix = "install Python's headers (python3.12-dev), which Triton needs at a kernel's first use"
        return Finding("compiler", f"{compiler}, but no {headers}/Python.h", Verdict.FAIL, fix)
    return Finding("compiler", compiler)


def check_memory(config: Config, gpus: Sequence[Gpu]) -> Finding:
    """Checks that the fullest GPU has room for each phase that `lockstep plan` computes, and for the engine's share."""
    model = read_architecture(config.model)
    phases = colocated_phases(config, model, rank_memory(config, model, is_gpu=True).values())
    shown = phases if config.placement == "colocated" else [phase for phase in phases if phase.name == "train"]
    least = min(gpus, key=lambda gpu: gpu.free_bytes)
    share = int(utilization(config) * least.total_bytes)
    needed = {f"to {phase.name}": phase.total for phase in shown} | {"for an engine": share}
    what, most = max(needed.items(), key=lambda item: item[1])
    found = f"GPU {least.index} has {_gib(least.free_bytes)} free of {_gib(least.total_bytes)}"
    for name, size in needed.items():
        if size > least.total_bytes:
            fix = "`lockstep plan --suggest` lists what fits"
            return Finding("GPU memory", f"{found}, and {_gib(size)} are needed {name}", Verdict.FAIL, fix)
    if most > least.free_bytes:
        fix = "end the other processes on it (nvidia-smi names them), or lower rollout.engine.gpu_memory_utilization"
        return Finding("GPU memory", f"{found}, and {_gib(most)} are needed {what}", Verdict.FAIL, fix)
    return Finding("GPU memory", f"{found}; {_gib(most)} are needed {what}, and a few GiB that no plan counts")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
