"""An environment whose code raises, hangs or returns nonsense; the run's own code is in workspace.py."""

from tests.campaign.faults.base import Fault, Scene
from tests.campaign.workspace import TROUBLE

_FOR_S = 1.0


def _trouble(what: str):
    async def cause(scene: Scene, victim: str) -> None:
        path = scene.cluster.directory / TROUBLE
        path.write_text(what)
        scene.undos.append((_FOR_S, path.unlink))

    return cause


FAULTS = tuple(Fault(f"environment-{what}", ("environment",), _trouble(what)) for what in ("raises", "hangs", "lies"))
