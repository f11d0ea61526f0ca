"""Converts Megatron's sharded tensors to those of torch's distributed checkpoint.

Reason: Megatron's own strategy converts and writes in one function, and its writer forks processes, which outlive a
trainer that is killed. Seen with Megatron-Core 0.16.1.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


def torch_tensors(tensors: dict[Any, Any]) -> Mapping[str, Any]:
    """Returns the tensors that this rank writes, by key, from nested dicts of sharded tensors."""
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(flat)
