"""Reads and sets what Megatron keeps in globals and private attributes: groups, generators and optimizer state.

Seen with Megatron-Core 0.16.1, the hybrid optimizer on GPU only.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker


def current_groups() -> dict[str, object]:
    """Returns a copy of all globals that hold process groups, for `set_groups`.

    Reason: Megatron keeps the groups of one model in private globals of parallel_state, but several roles, each with
    its own layout, share a process.
    """
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(parallel_state).items()
        if name == "_global_process_group_list" or (name.startswith("_") and name.isupper())
    }


def set_groups(groups: Mapping[str, object]) -> None:
    parallel_state.__dict__.update(groups)


NO_GROUPS = current_groups()
"""The globals as they are before any group is made."""


def group_of(group: object) -> dist.ProcessGroup:
    """Returns `group` typed as a process group; fails if this rank is not a member.

    Reason: torch and Megatron annotate groups as `ProcessGroup | int | None`, which covers ranks outside of a group.
    """
    assert isinstance(group, dist.ProcessGroup), f"this rank is not in the process group: {group}"
    return group


def rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker of this process's generators, which forks into each rank's own.

    Reason: Megatron keeps it in a global that is None until the first use, and its function for it has no return type.
    """
    tracker = get_cuda_rng_tracker()
    assert isinstance(tracker, CudaRNGStatesTracker), f"Megatron-Core made another tracker: {type(tracker)}"
    return tracker


def allocate_hybrid(hybrid: HybridDeviceOptimizer) -> None:
    """Allocates the moments as zeros.

    Reason: Megatron allocates them only by an update, and its dummy_step uses random gradients for it.
    """
    for inner in hybrid.sub_optimizers:
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if inner.state[parameter]:
                continue
            if isinstance(inner, torch.optim.Adam):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}
            else:
                inner.initialize_state(parameter, False)
    hybrid._sync_sub_optimizers_state_to_hdo()  # the outer optimizer's state refers to the inner ones'


def share_hybrid(hybrid: HybridDeviceOptimizer) -> None:
    """Copies the state of a hybrid optimizer to its inner optimizers. Reason: Megatron's method for it is private."""
    hybrid._sync_hdo_state_to_sub_optimizers()


def inner_optimizers(part: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Returns the torch optimizers, which count updates. `optimizer_cpu_offload` makes several in one part."""
    return part.optimizer.sub_optimizers if isinstance(part.optimizer, HybridDeviceOptimizer) else [part.optimizer]


def take_range(part: DistributedOptimizer, parameter: torch.nn.Parameter, whole: Mapping[str, torch.Tensor]) -> None:
    """Sets this rank's range of a parameter's float32 weights and moments from the whole tensors.

    Reason: Megatron can load a fully reshardable state only with the whole state of all parameters in memory.
    """
    span = part._get_model_param_range_map(parameter)["param"]
    # Clones: the hybrid optimizer keeps these tensors, and views would keep the whole tensors in memory.
    own = {key: tensor.flatten()[span.start : span.end].clone() for key, tensor in whole.items()}
    part._set_main_param_and_optimizer_states(parameter, own)


def torch_tensors(tensors: ShardedStateDict) -> Mapping[str, object]:
    """Returns the tensors that this rank writes, by key, from nested dicts of sharded tensors.

    Reason: Megatron's own strategy converts them to those of torch's distributed checkpoint and writes them in one
    function, and its writer forks processes, which outlive a trainer that is killed.
    """
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(flat)
