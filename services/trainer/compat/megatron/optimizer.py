"""Makes and sets the state of Megatron's optimizers.

Reason: Megatron can load a fully reshardable state only as a whole, and allocates the hybrid optimizer's moments only
by updating the weights. Seen with Megatron-Core 0.16.1, the hybrid optimizer on GPU only.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


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
