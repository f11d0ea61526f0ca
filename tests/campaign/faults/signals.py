"""SIGKILL, and SIGSTOP: for a moment, for longer than every deadline, or for longer than keepalive and lease too."""

import contextlib
import os
import signal

from tests.campaign.faults.base import PROCESSES, Fault, Scene

MOMENT_S, LONG_S, VERY_LONG_S = 0.5, 8.0, 40.0


async def _kill(scene: Scene, victim: str) -> None:
    send(scene.pid_of(victim), signal.SIGKILL)


def _stop(for_s: float):
    async def stop(scene: Scene, victim: str) -> None:
        pid = scene.pid_of(victim)
        send(pid, signal.SIGSTOP)
        scene.undos.append((for_s, lambda: send(pid, signal.SIGCONT)))

    return stop


def send(pid: int | None, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)


FAULTS = (
    Fault("kill", (*PROCESSES, "worker"), _kill),
    Fault("stop", (*PROCESSES, "worker"), _stop(MOMENT_S)),
    Fault("stop-long", (*PROCESSES, "worker"), _stop(LONG_S)),
    Fault("stop-40s", PROCESSES, _stop(VERY_LONG_S)),
)
