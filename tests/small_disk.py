"""Real disks of a few MB: a tmpfs that a test may fill or make read-only, and an ext4 that can fail while in use."""

import asyncio
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NUM_BYTES = 4 << 20
# What a journal and the rest of an ext4 take.
_EXT4_BYTES = 12 << 20
_REPAIR_S = 60.0
_CLONE_NEWNS = 0x00020000  # sched.h


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, path: Path):
        self.path, self._filler = path, path / "filler"

    def fill(self) -> None:
        """Takes all of its space."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    pass

    def fill_up_to(self, num_bytes: int) -> None:
        """Takes its space except for `num_bytes`."""
        self.fill()
        os.truncate(self._filler, self._filler.stat().st_size - num_bytes)

    def free(self) -> None:
        """Gives the space back."""
        self._filler.unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.path], check=True)


@contextmanager
def small_disk(path: Path, num_bytes: int = NUM_BYTES) -> Iterator[SmallDisk]:
    """Mounts a disk of `num_bytes` at `path`; skips the test where that is not permitted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", path]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root with CAP_SYS_ADMIN")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


class FailingDisk:
    """An ext4 file system in the file `image`, mounted at `path`."""

    def __init__(self, path: Path, image: Path):
        self.path, self._image = path, image

    def mount(self) -> bool:
        """Returns whether that is permitted."""
        command = ["mount", "-o", "loop,errors=remount-ro", self._image, self.path]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def fail(self) -> None:
        """Makes the kernel give it up, as after an error of the device.

        Nobody can write any more, not even to a file that is open. What was not synced is lost.
        """
        subprocess.run(["mount", "-o", "remount,abort", self.path], check=True)

    async def repair(self) -> None:
        """Mounts it anew, once nobody has a file open there."""
        async with asyncio.timeout(_REPAIR_S):
            while subprocess.run(["umount", self.path], check=False, capture_output=True).returncode:
                await asyncio.sleep(0.05)
        assert self.mount()


@contextmanager
def failing_disk(path: Path, num_bytes: int = NUM_BYTES) -> Iterator[FailingDisk]:
    """Mounts a disk with room for `num_bytes` at `path`; skips the test where that is not permitted."""
    path.mkdir()
    image = path.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(num_bytes + _EXT4_BYTES)
    subprocess.run(["mkfs.ext4", "-qF", image], check=True)
    disk = FailingDisk(path, image)
    if os.geteuid() != 0 or not disk.mount():
        pytest.skip("mounting a file needs root with CAP_SYS_ADMIN and a loop device")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def bind_read_only(path: Path) -> Callable[[], None]:
    """Makes the directory `path` read-only for whoever opens a file there from now on; returns what ends that."""
    subprocess.run(["mount", "--bind", path, path], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
    return lambda: subprocess.run(["umount", "--lazy", path], check=True) and None


def take_own_mounts() -> None:
    """Gives this process, and those that it starts, mounts of their own, which end with them; if that is permitted."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
