"""A real disk of a few MB: a tmpfs that a test may fill and make read-only."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NUM_BYTES = 4 << 20


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
