"""Turns Megatron's sharded tensors into what torch's distributed checkpoint saves.

Reason: Megatron's own strategy does this and the writing in one, and its writer forks processes, which outlive a
trainer that is killed. Seen with Megatron-Core 0.16.1.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


def torch_tensors(tensors: dict[Any, Any]) -> Mapping[str, Any]:
    """Returns those of nested dicts of sharded tensors that this rank writes, by their keys."""
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(flat)
