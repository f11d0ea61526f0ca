"""Tests that tensorboardX is imported without torch."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import pathlib, sys
from services.coordinator.observe.reporters import TensorBoard

reporter = TensorBoard(pathlib.Path(sys.argv[1]), 0)
reporter.step(1, {"loss": 0.5})
reporter.close()
print("torch" in sys.modules)
"""


def test_the_event_writer_needs_no_torch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False"]
    (file,) = tmp_path.iterdir()
    assert b"loss" in file.read_bytes()
