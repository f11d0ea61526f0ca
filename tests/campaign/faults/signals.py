"""SIGKILL, and SIGSTOP for a moment or for longer than every deadline."""

import contextlib
import os
import signal

from tests.campaign.faults.base import PROCESSES, Fault, Scene

MOMENT_S, LONG_S = 0.5, 8.0


async def _kill(scene: Scene, victim: str) -> None:
    _send(scene.pid_of(victim), signal.SIGKILL)


def _stop(for_s: float):
    async def stop(scene: Scene, victim: str) -> None:
        pid = scene.pid_of(victim)
        _send(pid, signal.SIGSTOP)
        scene.undos.append((for_s, lambda: _send(pid, signal.SIGCONT)))

    return stop


def _send(pid: int | None, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)


FAULTS = (
    Fault("kill", (*PROCESSES, "worker"), _kill),
    Fault("stop", (*PROCESSES, "worker"), _stop(MOMENT_S)),
    Fault("stop-long", PROCESSES, _stop(LONG_S)),
)
