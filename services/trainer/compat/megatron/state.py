"""Converts Megatron's sharded tensors to those of torch's distributed checkpoint.

Reason: Megatron's own strategy converts and writes in one function, and its writer forks processes, which outlive a
trainer that is killed. Seen with Megatron-Core 0.16.1.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker


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


def rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker of this process, which forks into each rank's own generator."""
    tracker = get_cuda_rng_tracker()
    assert isinstance(tracker, CudaRNGStatesTracker), f"Megatron-Core made another tracker: {type(tracker)}"
    return tracker


def is_hybrid(part: Any) -> bool:
    """Returns whether `optimizer_cpu_offload` made this optimizer, which updates a share of the weights on the CPU."""
    return isinstance(part.optimizer, HybridDeviceOptimizer)


def allocate_hybrid(part: Any) -> None:
    """Allocates the moments as zeros. Megatron's dummy_step would update the weights with random gradients."""
    optimizers = part.optimizer.sub_optimizers
    pairs = [(inner, each) for inner in optimizers for group in inner.param_groups for each in group["params"]]
    for inner, parameter in pairs:
        if inner.state[parameter]:
            continue
        if isinstance(inner, torch.optim.Adam):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[parameter] = {"step": torch.tensor(0.0), **moments}
        else:
            inner.initialize_state(parameter, False)
    part.optimizer._sync_sub_optimizers_state_to_hdo()  # the outer optimizer's state refers to the inner ones'


def inner_optimizers(part: Any) -> list[torch.optim.Optimizer]:
    """Returns the torch optimizers, which count updates."""
    return part.optimizer.sub_optimizers if is_hybrid(part) else [part.optimizer]


def share_hybrid(part: Any) -> None:
    """Copies the state of a hybrid optimizer to its inner optimizers."""
    part.optimizer._sync_hdo_state_to_sub_optimizers()


def take_range(part: DistributedOptimizer, parameter: torch.nn.Parameter, whole: Mapping[str, torch.Tensor]) -> None:
    """Sets this rank's range of a parameter's float32 weights and moments from the whole tensors."""
    span = part._get_model_param_range_map(parameter)["param"]
    # Clones: the hybrid optimizer keeps these tensors, and views would keep the whole tensors in memory.
    own = {key: tensor.flatten()[span.start : span.end].clone() for key, tensor in whole.items()}
    part._set_main_param_and_optimizer_states(parameter, own)


def torch_tensors(tensors: dict[Any, Any]) -> Mapping[str, Any]:
    """Returns the tensors that this rank writes, by key, from nested dicts of sharded tensors."""
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(flat)
