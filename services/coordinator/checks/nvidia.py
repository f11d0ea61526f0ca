"""Reads the properties of this host's GPUs from the NVIDIA driver's command, without loading the driver."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import NotFound, Unavailable
from services.coordinator.services.gpus import visible_gpus

_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU of this host."""

    index: str
    uuid: str
    total_bytes: int
    free_bytes: int


def read_gpus(command: Sequence[str] = _COMMAND) -> list[Gpu]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names or, if it is unset, all.

    Raises:
        NotFound: This host has no nvidia-smi.
        Unavailable: It fails, for example because the driver is not loaded.
    """
    if shutil.which(command[0]) is None:
        raise NotFound(f"{command[0]} not found: this host has no NVIDIA driver, or the container does not have it")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} has not answered within {_TIMEOUT_S:g} s; is a GPU lost?") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {' '.join((done.stdout + done.stderr).split())}")
    gpus = [_gpu(line) for line in done.stdout.splitlines() if line.strip()]
    names = visible_gpus()
    return [gpu for gpu in gpus if gpu.index in names or any(gpu.uuid.startswith(name) for name in names)]


def _gpu(line: str) -> Gpu:
    index, uuid, total_mib, free_mib = (part.strip() for part in line.split(","))
    return Gpu(index, uuid, int(total_mib) << 20, int(free_mib) << 20)
