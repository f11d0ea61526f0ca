"""Tests what the table of the source's size counts."""

import subprocess
import sys
from pathlib import Path

from benchmarks.source_size import Size, size_of, table

SOURCE = '''"""A module."""

from typing import (
    Any,
)


def f(x: Any) -> Any:  # after code
    # Why it is so.
    return x  # noqa: E501
'''


def test_lines_are_told_apart() -> None:
    assert size_of(SOURCE) == Size(lines=10, imports=3, any=2, comments=1)


def test_the_table_has_a_row_for_each_folder(tmp_path: Path) -> None:
    for name in ("common/rpc/client.py", "common/rpc/server.py", "trainer/losses/policy.py", "trainer/servicer.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    _, _, *rows = table(tmp_path)
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [(name, files, lines) for name, files, lines, *_ in cells] == [
        ("common/rpc", "2", "20"),
        ("trainer", "2", "20"),
        ("**all**", "4", "40"),
    ]
    assert cells[-1][3:] == ["10", "30.0 %", "8", "10.0 %"]


def test_the_command_has_a_help_and_ends_quietly_when_nobody_reads() -> None:
    command = f"{sys.executable} -m benchmarks.source_size"
    shown = subprocess.run(f"{command} --help", shell=True, capture_output=True, text=True)
    assert shown.returncode == 0 and "ROOT is a checkout" in shown.stdout
    closed = subprocess.run(f"{command} | true", shell=True, capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
