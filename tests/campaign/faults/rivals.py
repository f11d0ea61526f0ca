"""A second coordinator: of the same run, which the lock refuses, or of another run, which takes the services."""

from tests.campaign.faults.base import Fault, Scene


async def _same(scene: Scene, victim: str) -> None:
    scene.notes["rival"] = await scene.start_rival("run")


async def _other(scene: Scene, victim: str) -> None:
    scene.notes["rival"] = await scene.start_rival("rival")


FAULTS = (Fault("two-coordinators", ("run",), _same), Fault("another-run", ("services",), _other))
