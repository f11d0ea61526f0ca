"""Tests what is known of the memory of a host and its container, and the hint that a killed process was out of it."""

from pathlib import Path

import pytest

from services.common.memory import killed_hint, usable_memory

GIB = 1 << 30
V2 = ("memory.max", "memory.current", "")
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_")


def test_the_hint_has_the_numbers_that_are_known(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    2097152 kB\nHugePages_Total: 0\n")
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    hint = killed_hint("a.key", meminfo=meminfo, cgroup=tmp_path)
    assert hint.endswith(": lower a.key")
    assert "this host has 16.0 GiB, of which 2.0 are available now" in hint
    assert "this container or job may use 4.0 GiB" in hint
    assert "the kernel has killed 2 processes of this container or job" in hint


def test_unknown_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    hint = killed_hint("a.key", meminfo=tmp_path / "none", cgroup=tmp_path)
    assert hint == "something killed it; usually that is the kernel when memory runs out: lower a.key"


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    """A host with 16 GiB, of which 8 are available."""
    (tmp_path / "memory").mkdir()
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\n")
    return path


@pytest.mark.parametrize("files", [V2, V1])
@pytest.mark.parametrize(
    ("sizes", "expected"),  # in GiB: the limit, what is used, and what of that is pages of files
    [
        ((4, 3, 0), (4.0, 1.0)),
        ((4, 4, 3), (4.0, 3.0)),  # 3 of them are pages of files
        ((4, 5, 0), (4.0, 0.0)),
        ((12, 1, 0), (12.0, 8.0)),  # other containers have the rest
        ((64, 63, 0), (16.0, 1.0)),
        ((1 << 32, 40, 0), (16.0, 8.0)),  # what cgroup v1 says without a limit
    ],
)
def test_a_container_may_have_less_memory_than_its_host(
    meminfo: Path, files: tuple[str, str, str], sizes: tuple[int, int, int], expected: tuple[float, float]
) -> None:
    (limit_file, used_file, prefix), (limit_gib, used_gib, cached_gib) = files, sizes
    folder = meminfo.parent
    (folder / limit_file).write_text(f"{limit_gib * GIB}\n")
    (folder / used_file).write_text(f"{used_gib * GIB}\n")
    kinds = {"inactive_file": cached_gib * GIB // 3, "active_file": cached_gib * GIB // 3 * 2, "anon": GIB}
    stat = "".join(f"{prefix}{kind} {size}\n" for kind, size in kinds.items())
    (folder / limit_file).with_name("memory.stat").write_text(stat)
    assert usable_memory(meminfo, folder) == pytest.approx(expected)


def test_a_host_without_a_limit_has_its_own_memory(meminfo: Path) -> None:
    folder = meminfo.parent
    assert usable_memory(meminfo, folder) == (16.0, 8.0)
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text(f"{GIB}\n")
    assert usable_memory(meminfo, folder) == (16.0, 8.0)
    assert usable_memory(folder / "none", folder) is None


@pytest.mark.parametrize(
    ("files", "line"), [(V2, "0::/slurm/job_7/step_0/task_0"), (V1, "4:cpu,memory:/slurm/job_7/step_0/task_0")]
)
def test_the_smallest_limit_of_a_job_and_all_around_it_counts(
    meminfo: Path, files: tuple[str, str, str], line: str
) -> None:
    root, membership = meminfo.parent, meminfo.with_name("own")
    membership.write_text(f"9:name=systemd:/other\n{line}\n5:memory_other:/other\n")
    sizes = {"slurm": (12, 11), "slurm/job_7": (4, 1), "slurm/job_7/step_0": (6, 1), "slurm/job_8": (1, 1)}
    for path, (limit_gib, used_gib) in {**sizes, "other": (2, 2)}.items():
        for name, size_gib in zip(files[:2], (limit_gib, used_gib), strict=True):
            file = (root / name).parent / path / Path(name).name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{size_gib * GIB}\n")
    assert usable_memory(meminfo, root, membership) == (4.0, 1.0)  # the job's limit; another job uses the rest
    if files == V2:
        (root / "slurm/job_7/memory.events").write_text("oom_kill 2\n")
        hint = killed_hint("a.key", meminfo=meminfo, cgroup=root, membership=membership)
        assert "this container or job may use 4.0 GiB; the kernel has killed 2 processes" in hint
    membership.write_text("0::/\n4:memory:/docker/1f\n")  # a container sees its own at the root
    assert usable_memory(meminfo, root, membership) == (16.0, 8.0)
    for name in files[:2]:
        (root / name).write_text(f"{GIB}\n")
    assert usable_memory(meminfo, root, membership) == (1.0, 0.0)


def test_lines_that_are_no_numbers_are_left_out(meminfo: Path) -> None:
    """Containers that emulate the files of the kernel may have any."""
    folder = meminfo.parent
    meminfo.write_bytes(meminfo.read_bytes() + b"Huge:\nZswap: none\n\xff: 1\n")
    (folder / "memory.max").write_text(f"{4 * GIB}\n")
    (folder / "memory.current").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon max\nactive_file {GIB}\n")
    assert usable_memory(meminfo, folder) == (4.0, 2.0)
    meminfo.write_text("MemTotal: all\nMemAvailable: some\n")
    assert usable_memory(meminfo, folder) == (4.0, 2.0)
