"""Reads the memory of this host and of a process's device, and explains why a process may have been killed for it."""

from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypedDict

from lockstep.types.v1.types_pb2 import DeviceMemory

if TYPE_CHECKING:
    import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_GIB = 2**30


def usable_memory(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP
) -> tuple[float, float] | None:
    """Returns how many GiB this process may use, and how many of them are available now; None if neither is known.

    Both are the smallest of the host's, of a container's, and of a job's (Slurm's --mem, systemd's MemoryMax).
    """
    known = [memory for memory in (_host_memory(meminfo), *_limits(cgroup, membership)) if memory]
    return (min(total for total, _ in known), min(free for _, free in known)) if known else None


def _host_memory(meminfo: Path) -> tuple[float, float] | None:
    known = {name: kib * 1024 / _GIB for name, kib in _numbers(meminfo).items()}
    return (known["MemTotal"], known["MemAvailable"]) if {"MemTotal", "MemAvailable"} <= known.keys() else None


def _limits(cgroup: Path, membership: Path) -> list[tuple[float, float]]:
    """Returns each limit that holds for this process, and what it leaves, in GiB."""
    limits: list[tuple[float, float]] = []
    for folders, limit_file, used_file, prefix in (
        (_cgroups(cgroup, "", membership), "memory.max", "memory.current", ""),
        (_cgroups(cgroup / "memory", "memory", membership), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in folders:
            limit, used = ("".join(_lines(folder / name)) for name in (limit_file, used_file))
            if limit.isdecimal() and used.isdecimal():
                stat = _numbers(folder / "memory.stat")
                # The kernel takes back the pages of files before it kills: what was read before does not count as used.
                cached = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                free = max(int(limit) - max(int(used) - cached, 0), 0)
                limits.append((int(limit) / _GIB, free / _GIB))
    return limits


def _cgroups(root: Path, controller: str, membership: Path) -> list[Path]:
    """Returns the folders of this process's cgroup and of all around it, whose limits hold for it too.

    `controller` is memory for cgroup v1 and empty for v2. Only `root` exists in a container, which sees its own there.
    """
    lines = (line.split(":", 2) for line in _lines(membership))
    paths = [path for _, controllers, path in lines if controller in controllers.split(",")]
    own = PurePath(paths[0].lstrip("/") if paths else "")
    return [root / path for path in (own, *own.parents)]


def killed_hint(key: str, *, meminfo: Path = MEMINFO, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> str:
    """Returns why a process may have got SIGKILL (exit code -9), with this host's memory and the config key to lower.

    The kernel kills a process when the host, or the limit of a container or job (cgroup v2), has no memory left.
    """
    parts: list[str] = []
    if memory := _host_memory(meminfo):
        parts.append("this host has {:.1f} GiB, of which {:.1f} are available now".format(*memory))
    folders = _cgroups(cgroup, "", membership)
    limits = ["".join(_lines(folder / "memory.max")) for folder in folders]
    if known := [int(limit) for limit in limits if limit.isdecimal()]:
        parts.append(f"this container or job may use {min(known) / _GIB:.1f} GiB")
    events = [_numbers(folder / "memory.events") for folder in folders]
    if num_killed := next((known.get("oom_kill") for known in events if known), None):  # of the innermost
        parts.append(f"the kernel has killed {num_killed} processes of this container or job for memory")
    numbers = f" ({'; '.join(parts)})" if parts else ""
    return f"something killed it; usually that is the kernel when memory runs out{numbers}: lower {key}"


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers of a file by name; containers that emulate the kernel may have other lines."""
    pairs = (line.split()[:2] for line in _lines(path))
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # not this kind of host; the other numbers are still known
        return []


class DeviceState(TypedDict):
    """The fields of types.v1.DeviceMemory that do not depend on a call."""

    device_uuid: str
    resident_bytes: int
    device_total_bytes: int
    device_free_bytes: int
    host_bytes: int


def device_state(device: "torch.device", *, resident_bytes: int, host_bytes: int = 0) -> DeviceState:
    """Returns the state of `device`; `resident_bytes` and `host_bytes` are the process's own.

    On CPU the UUID is empty, and size and free memory are 0.
    """
    uuid, free, total = "", 0, 0
    if device.type == "cuda":
        import torch  # late: the coordinator, which reads the host's memory, has no torch

        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # pyright: ignore[reportUnknownMemberType]
        free, total = torch.cuda.mem_get_info(device)
    return DeviceState(
        device_uuid=uuid,
        resident_bytes=resident_bytes,
        device_total_bytes=total,
        device_free_bytes=free,
        host_bytes=host_bytes,
    )


def changed(before: DeviceState, after: DeviceState, duration_s: float) -> DeviceMemory:
    """Returns the message about a call that changed the process's memory."""
    taken = after["resident_bytes"] - before["resident_bytes"]
    return DeviceMemory(**after, freed_bytes=max(0, -taken), taken_bytes=max(0, taken), duration_s=duration_s)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
