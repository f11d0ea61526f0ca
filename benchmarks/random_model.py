"""Random weights of a real shape, for benchmarks that start services on them."""

import subprocess
import sys
from pathlib import Path


def make_random_model(directory: Path, shape: str, *, is_tiny: bool) -> Path:
    """DIRECTORY/SHAPE, written by a process of its own, which leaves nothing on a GPU."""
    tiny = ["tiny"] if is_tiny else []
    command = [sys.executable, "-m", "benchmarks.megatron_model", str(directory), shape, *tiny, "weights-only"]
    subprocess.run(command, check=True)
    return directory / shape
