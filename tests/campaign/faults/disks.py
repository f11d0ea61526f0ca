"""Full and read-only disks below the run's directory, and files whose bytes flip while nobody has them open."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.campaign.faults.base import Fault, Scene
from tests.small_disk import bind_read_only, failing_disk, small_disk

_FOR_S = 2.0
_SESSION_S = 1e6
"""Until the session ends."""
_DIRECTORIES = {name: name for name in ("batches", "checkpoints", "history", "evaluations")} | {"run": "."}


async def _fill(scene: Scene, victim: str) -> None:
    scene.disk.fill()
    scene.undos.append((_FOR_S, scene.disk.free))


async def _read_only(scene: Scene, victim: str) -> None:
    """Makes the whole disk read-only, as the kernel does after an error, or a directory for all that is opened there.

    A disk is mounted again after the session; victim "resumed" only after the next one has met it too.
    """
    if victim in ("disk", "resumed"):
        scene.disk.fail()
        if victim == "disk":
            scene.undos.append((_SESSION_S, scene.disk.repair))
        else:
            scene.notes["mend"] = scene.disk.repair
        return
    path = scene.run_dir / _DIRECTORIES[victim]
    scene.undos.append((_FOR_S, bind_read_only(path if path.is_dir() else scene.run_dir)))


def _damage(pattern: str, change: Callable[[bytes, Scene], bytes]):
    async def damage(scene: Scene, victim: str) -> None:
        """Kills coordinator and trainer, and damages the newest file. It is restored when the run refuses it."""
        for one in ("coordinator", "trainer"):
            pid = scene.pid_of(one)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        files = sorted(path for path in scene.run_dir.glob(pattern) if path.is_file() and path.stat().st_size)
        if files:
            path, content = files[-1], files[-1].read_bytes()
            path.write_bytes(change(content, scene))
            scene.notes["restore"] = (path, content)

    return damage


def _flip(content: bytes, scene: Scene) -> bytes:
    place = scene.number.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << scene.number.randrange(8)]) + content[place + 1 :]


def _tear(content: bytes, scene: Scene) -> bytes:
    return content[: scene.number.randrange(len(content))]


_FILES = {
    "batch": "batches/*.parquet",
    "checkpoint": "checkpoints/step-*/state/*",
    "manifest": "checkpoints/step-*/manifest.json",
    "metrics": "metrics.jsonl",
}


def restore(notes: dict[str, object]) -> bool:
    """Restores the damaged file, as from a backup; returns whether there was one."""
    if "restore" not in notes:
        return False
    path, content = notes.pop("restore")  # type: ignore[misc]
    if Path(path).parent.is_dir():
        Path(path).write_bytes(content)
    return True


FAULTS = (
    Fault("full-disk", ("disk",), _fill, disk=small_disk),
    Fault("read-only-disk", ("disk", "resumed", *_DIRECTORIES), _read_only, disk=failing_disk),
    *(Fault(f"flip-{name}", ("file",), _damage(pattern, _flip)) for name, pattern in _FILES.items()),
    *(Fault(f"tear-{name}", ("file",), _damage(pattern, _tear)) for name, pattern in _FILES.items()),
)
