"""Reads this host's memory, and explains why a process may have been killed for it."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30


def host_memory(meminfo: Path = MEMINFO) -> tuple[float, float] | None:
    """Returns how many GiB this host has, and how many of them are available now; None if that is not known."""
    known = {name: int(value.split()[0]) * 1024 / _GIB for name, _, value in map(_parts, _lines(meminfo)) if value}
    return (known["MemTotal"], known["MemAvailable"]) if {"MemTotal", "MemAvailable"} <= known.keys() else None


def killed_hint(key: str, *, meminfo: Path = MEMINFO, cgroup: Path = _CGROUP) -> str:
    """Returns why a process may have got SIGKILL (exit code -9), with this host's memory and the config key to lower.

    The kernel kills a process when the host, or the container's limit (cgroup v2), has no memory left.
    """
    parts: list[str] = []
    if memory := host_memory(meminfo):
        parts.append("this host has {:.1f} GiB, of which {:.1f} are available now".format(*memory))
    limit = "".join(_lines(cgroup / "memory.max"))
    if limit.isdecimal():
        parts.append(f"this container may use {int(limit) / _GIB:.1f} GiB")
    events = dict(line.split() for line in _lines(cgroup / "memory.events") if len(line.split()) == 2)
    if int(events.get("oom_kill", "0")):
        parts.append(f"the kernel has killed {events['oom_kill']} processes of this container for memory")
    numbers = f" ({'; '.join(parts)})" if parts else ""
    return f"something killed it; usually that is the kernel when memory runs out{numbers}: lower {key}"


def _parts(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not this kind of host; the other numbers are still known
        return []
