"""Reads and sets the globals of megatron.core.parallel_state.

Reason: Megatron keeps the process groups of one model in private globals of a module, and roles with layouts of their
own share a process. Seen with Megatron-Core 0.16.1.
"""

from typing import Any

from megatron.core import parallel_state


def current_groups() -> dict[str, Any]:
    """Returns a copy of all globals, for `set_groups`."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(parallel_state).items()
        if name == "_global_process_group_list" or (name.startswith("_") and name.isupper())
    }


def set_groups(groups: dict[str, Any]) -> None:
    """Makes Megatron's globals name these groups."""
    vars(parallel_state).update(groups)


NO_GROUPS = current_groups()
"""The globals before any group is made."""
