"""A process that may open no more files, or get no more memory, for a moment."""

import resource
from pathlib import Path

from tests.campaign.faults.base import Fault, Scene

_FOR_S = 1.0
_SOME = ("coordinator", "trainer", "rollout-0", "reward", "worker")


async def _descriptors(scene: Scene, victim: str) -> None:
    pid = scene.pid_of(victim)
    if pid is not None:
        numbers = [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()]
        _limit(scene, pid, resource.RLIMIT_NOFILE, max(numbers) + 1)


async def _memory(scene: Scene, victim: str) -> None:
    pid = scene.pid_of(victim)
    if pid is not None:
        num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        _limit(scene, pid, resource.RLIMIT_AS, num_pages * resource.getpagesize() + (1 << 20))


def _limit(scene: Scene, pid: int, what: int, value: int) -> None:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (value, before[1]))

    def lift() -> None:
        try:
            resource.prlimit(pid, what, before)
        except ProcessLookupError:
            return

    scene.undos.append((_FOR_S, lift))


FAULTS = (Fault("descriptors", _SOME, _descriptors), Fault("memory", _SOME, _memory))
