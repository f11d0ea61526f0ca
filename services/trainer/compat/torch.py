"""Holds what the trainer needs of torch that has no public name. Seen with torch 2.11.0 (CUDA) and 2.13.0 (CPU)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from services.common.compat.versions import require_version

require_version("torch")


def record_allocations(max_events: int) -> None:
    """Keeps the last `max_events` allocations and frees of GPU memory, with Python stacks.

    Reason: torch documents its memory snapshots, but their functions have private names.
    """
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_events, clear_history=True)


def stop_recording() -> None:
    """Ends `record_allocations` and forgets what it kept."""
    torch.cuda.memory._record_memory_history(enabled=None)


def allocations() -> Mapping[str, Any]:
    """Returns what is allocated and what `record_allocations` kept, as plain values; torch's own dump would pickle."""
    return torch.cuda.memory._snapshot()


def storage_id(tensor: torch.Tensor) -> int:
    """Returns the same number for tensors that share a storage, whether or not it has memory.

    Reason: two Python objects stand for one storage, and the address of one that was resized to 0 is 0.
    """
    return tensor.untyped_storage()._cdata


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Returns whether a buffer of the module is in its checkpoints.

    Reason: torch has no public name for it.
    """
    return buffer not in module._non_persistent_buffers_set


class CallableParameters(nn.ParameterDict):
    """Parameters by name. A call returns them, and runs the hooks of a forward.

    Reason: DDP with overlap_param_gather gathers weights in such hooks, and torch's ParameterDict forbids to call it.
    """

    __call__: Callable[..., dict[str, torch.Tensor]] = nn.Module.__call__

    def forward(self) -> dict[str, torch.Tensor]:
        """Returns the parameters."""
        return dict(self.items())
