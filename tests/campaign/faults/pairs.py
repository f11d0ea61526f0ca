"""A GPU that fails or stalls: what a colocated run has there, a trainer rank and an engine, is killed or stopped."""

import signal

from tests.campaign.faults.base import Fault, Scene
from tests.campaign.faults.signals import LONG_S, send

_MEMBERS = {"pair-0": ("trainer", "engine-0"), "pair-1": ("rank-1", "engine-1")}


async def _kill(scene: Scene, victim: str) -> None:
    for pid in _pids(scene, victim):
        send(pid, signal.SIGKILL)


async def _stop(scene: Scene, victim: str) -> None:
    pids = _pids(scene, victim)
    for pid in pids:
        send(pid, signal.SIGSTOP)
    scene.undos.append((LONG_S, lambda: [send(pid, signal.SIGCONT) for pid in pids] and None))


def _pids(scene: Scene, victim: str) -> list[int | None]:
    return [scene.pid_of(one) for one in _MEMBERS[victim]]


FAULTS = (Fault("kill-pair", (*_MEMBERS,), _kill), Fault("stop-pair", (*_MEMBERS,), _stop))
