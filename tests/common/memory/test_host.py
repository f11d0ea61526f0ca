"""Tests the hint that a killed process may have been out of memory."""

from pathlib import Path

from services.common.memory import killed_hint


def test_the_hint_has_the_numbers_that_are_known(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    2097152 kB\nHugePages_Total: 0\n")
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    hint = killed_hint("a.key", meminfo=meminfo, cgroup=tmp_path)
    assert hint.endswith(": lower a.key")
    assert "this host has 16.0 GiB, of which 2.0 are available now" in hint
    assert "this container may use 4.0 GiB" in hint
    assert "the kernel has killed 2 processes of this container" in hint


def test_unknown_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    hint = killed_hint("a.key", meminfo=tmp_path / "none", cgroup=tmp_path)
    assert hint == "something killed it; usually that is the kernel when memory runs out: lower a.key"
