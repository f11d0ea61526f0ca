"""The GPUs of this host: which there are, which of them each service gets, and who holds those that are shared."""

import asyncio
import math
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.common.config.load import AnyConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, NotFound, Unavailable
from services.common.tasks import keep

Switch = Callable[[], Awaitable[None]]


class Side(StrEnum):
    TRAINER = "trainer"
    ENGINES = "engines"


class OwnGpus:
    """The GPUs of a run in which each service has its own."""

    def held_by(self, side: Side) -> AbstractAsyncContextManager[None]:
        """Holds the GPUs for one side inside the block, which any number of callers of that side may enter."""
        return nullcontext()

    def opening_engine(self) -> AbstractAsyncContextManager[None]:
        """Holds the GPUs for an engine that starts, which has no weights yet."""
        return nullcontext()


class SharedGpus(OwnGpus):
    """The GPUs of a colocated run. The engines hold them first."""

    def __init__(self) -> None:
        self._side, self._num_holders = Side.ENGINES, 0
        self._changed = asyncio.Condition()
        self._switches: Mapping[Side, Switch] = {}
        self._notifying: set[asyncio.Task[None]] = set()

    def on_switch(self, switches: Mapping[Side, Switch]) -> None:
        """Sets the function that is awaited when the GPUs go from one side to the other. Nobody holds them
        meanwhile."""
        self._switches = switches

    def held_by(self, side: Side) -> AbstractAsyncContextManager[None]:
        return self._held_when(lambda: self._side is side or not self._num_holders, side)

    def opening_engine(self) -> AbstractAsyncContextManager[None]:
        # Waits for the next switch to the engines, and makes none.
        return self._held_when(lambda: self._side is Side.ENGINES, Side.ENGINES)

    @asynccontextmanager
    async def _held_when(self, is_free: Callable[[], bool], side: Side) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(is_free)
            if self._side is not side:
                # With the lock, so that nobody gets the GPUs before the switch is complete. One that fails leaves them
                # where they are, and the next caller tries again.
                await self._switches[side]()
                self._side = side
            self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            keep(self._notifying, self._notify())  # a canceled caller must not wait for the lock

    @asynccontextmanager
    async def passing_to_engines(self) -> AsyncIterator[Side]:
        """Waits until nobody holds the GPUs and yields who had them last. After the block the engines have them."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._num_holders)
            yield self._side
            self._side = Side.ENGINES
            self._changed.notify_all()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def gpus_of(config: Config) -> OwnGpus:
    """Returns the GPUs of a run. Where trainer and engines fit beside each other, each holds its part of them."""
    return SharedGpus() if config.takes_turns else OwnGpus()


_DEVICES = Path("/dev")


def visible_gpus() -> list[str]:
    """Returns the GPUs named in CUDA_VISIBLE_DEVICES or, if it is unset, all NVIDIA GPUs of this host.

    Loads no driver library.

    Raises:
        InvalidInput: It names a GPU that does not exist, or one twice. CUDA would silently use fewer GPUs, or none.
    """
    num_gpus = sum(path.name.removeprefix("nvidia").isdecimal() for path in _DEVICES.glob("nvidia*"))
    every = [str(index) for index in range(num_gpus)]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).replace(" ", "")
    names = [] if named in ("", "-1") or not num_gpus else named.split(",")
    wrong = [name for name in names if not (name in every or name.startswith(("GPU-", "MIG-")))]
    if wrong or len(set(names)) < len(names):
        raise InvalidInput(
            f"CUDA_VISIBLE_DEVICES={named}: this host has {len(every)} GPUs, numbered from 0; name each once, or unset "
            "it",
            field="CUDA_VISIBLE_DEVICES",
        )
    return names


def split_gpus(
    ranks: dict[str, int], config: AnyConfig, *, available: Sequence[str], start_rollout: bool
) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES by service name; empty if the host has no GPU.

    `ranks` has the number of ranks of each trainer that is started here, as replicas are with `start_rollout`, and
    `available` this host's GPUs, as `visible_gpus` returns them.

    Raises:
        InvalidInput: The host has GPUs, but fewer than the services need.
    """
    if not available:
        return {}
    wanted, of_replica = dict(ranks), "tensor_parallel_size"
    if start_rollout and isinstance(config, Config):
        if config.placement == "colocated":
            return _shared_gpus(config, available)
        sizes = config.rollout.parallel_sizes
        replica, of_replica = math.prod(sizes.values()), " x ".join(sizes)
        wanted |= {f"rollout-{index}": replica for index in range(config.rollout.num_replicas)}
    total = sum(wanted.values())
    if total > len(available):
        raise InvalidInput(
            f"this host has {len(available)} usable GPUs, but the trainers' num_ranks and rollout.num_replicas x "
            f"{of_replica} need {total}; lower them, or give the addresses of services on other hosts",
            field="trainer.num_ranks",
        )
    devices = iter(available)
    return {name: ",".join(next(devices) for _ in range(count)) for name, count in wanted.items()}


def _shared_gpus(config: Config, available: Sequence[str]) -> dict[str, str]:
    """Returns the same GPUs for the trainer's ranks and, in their order, for the workers of the replicas."""
    num_ranks, num_replicas = config.trainer.num_ranks, config.rollout.num_replicas
    if num_ranks > len(available):
        raise InvalidInput(
            f"this host has {len(available)} usable GPUs, but trainer.num_ranks, which colocated engines share, is "
            f"{num_ranks}; lower it",
            field="trainer.num_ranks",
        )
    size = num_ranks // num_replicas
    shares = {f"rollout-{index}": available[index * size : (index + 1) * size] for index in range(num_replicas)}
    return {name: ",".join(gpus) for name, gpus in {"trainer": available[:num_ranks], **shares}.items()}


_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Gpu:
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
    names, rows = visible_gpus(), [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [
        Gpu(index, uuid, int(total_mib) << 20, int(free_mib) << 20)
        for index, uuid, total_mib, free_mib in rows
        if index in names or any(uuid.startswith(name) for name in names)
    ]
