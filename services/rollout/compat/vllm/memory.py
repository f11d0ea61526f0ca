"""Reads how much memory vLLM's sleep mode has given back to the GPU.

Reason: vLLM logs it only, and torch still counts memory that sleep mode has unmapped as reserved. Seen with vLLM 0.26.0
(CUDA); `is_asleep` came later. vLLM has no sleep mode on CPU.
"""

from collections.abc import Collection, Iterator
from typing import Any

WEIGHTS, KV_CACHE = "weights", "kv_cache"


def asleep_bytes(asleep: Collection[str]) -> int:
    """Returns the bytes that are unmapped while the parts `asleep` sleep."""
    return sum(data.handle[1] for data in _allocations(asleep))


def wake_bytes(part: str, asleep: Collection[str]) -> int:
    """Returns the bytes that waking `part` maps: its own, and those of no part, such as CUDA graphs."""
    parts = {part} | ({data.tag for data in _allocations(asleep)} - {WEIGHTS, KV_CACHE})
    return sum(data.handle[1] for data in _allocations(asleep) if data.tag in parts)


def _allocations(asleep: Collection[str]) -> Iterator[Any]:
    """Yields the allocations that are unmapped."""
    if not asleep:
        return
    from vllm.device_allocator.cumem import CuMemAllocator  # only with CUDA

    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if getattr(data, "is_asleep", data.tag in asleep):
            yield data
