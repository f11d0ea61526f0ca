"""The clock of the process at the gate jumps by an hour."""

from tests.campaign.faults.base import Fault, Scene

_JUMP_S = 3600


async def _forward(scene: Scene, victim: str) -> None:
    scene.answer = f"clock {_JUMP_S}"


async def _back(scene: Scene, victim: str) -> None:
    scene.answer = f"clock -{_JUMP_S}"


FAULTS = (Fault("clock-forward", ("at the gate",), _forward), Fault("clock-back", ("at the gate",), _back))
