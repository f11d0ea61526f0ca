"""Reads and sets the globals of megatron.core.parallel_state.

Reason: Megatron keeps the process groups of one model in private globals of a module, but several roles, each with its
own layout, share a process. Seen with Megatron-Core 0.16.1.
"""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def current_groups() -> dict[str, Any]:
    """Returns a copy of all group globals, for `set_groups`."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(parallel_state).items()
        if name == "_global_process_group_list" or (name.startswith("_") and name.isupper())
    }


def set_groups(groups: dict[str, Any]) -> None:
    """Sets Megatron's globals to `groups`, which `current_groups` returned."""
    parallel_state.__dict__.update(groups)


def group_of(group: object) -> dist.ProcessGroup:
    """Returns `group` typed as a process group; fails if this rank is not a member.

    Reason: torch and Megatron annotate groups as `ProcessGroup | int | None`, which covers ranks outside of a group.
    """
    assert isinstance(group, dist.ProcessGroup), f"this rank is not in the process group: {group}"
    return group


NO_GROUPS = current_groups()
"""Holds the globals as they are before any group is made."""
