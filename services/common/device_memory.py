"""Reads the memory of a process's device."""

from typing import TypedDict

import torch
from lockstep.types.v1.types_pb2 import DeviceMemory


class DeviceState(TypedDict):
    """Holds fields of types.v1.DeviceMemory that do not depend on a call."""

    device_uuid: str
    resident_bytes: int
    device_total_bytes: int
    device_free_bytes: int
    host_bytes: int


def device_state(device: torch.device, *, resident_bytes: int, host_bytes: int = 0) -> DeviceState:
    """Returns the state of `device`; `resident_bytes` and `host_bytes` are the process's own.

    On CPU the UUID is empty, and size and free memory are 0.
    """
    uuid, free, total = "", 0, 0
    if device.type == "cuda":
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
    """Returns a number of bytes as text."""
    return f"{num_bytes / 2**30:.2f} GiB"
