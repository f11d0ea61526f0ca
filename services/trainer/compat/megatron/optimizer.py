"""Makes and sets the state inside Megatron's optimizers.

Reason: Megatron loads a fully reshardable state only whole, and makes the hybrid optimizer's moments only by updating
the weights. Seen with Megatron-Core 0.16.1, the hybrid optimizer on GPU only.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def is_hybrid(part: Any) -> bool:
    """Returns whether this is `optimizer_cpu_offload`'s: a share of the weights is updated by the processor."""
    return isinstance(part.optimizer, HybridDeviceOptimizer)


def allocate_hybrid(part: Any) -> None:
    """Makes the moments. Megatron's dummy_step would move the weights by random gradients for them."""
    for inner in part.optimizer.sub_optimizers:
        for group in inner.param_groups:
            for parameter in group["params"]:
                if inner.state[parameter]:
                    continue
                if isinstance(inner, torch.optim.Adam):
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    inner.state[parameter] = {"step": torch.tensor(0.0), **moments}
                else:
                    inner.initialize_state(parameter, False)
    part.optimizer._sync_sub_optimizers_state_to_hdo()  # the outer one's state is that of the inner ones


def inner_optimizers(part: Any) -> list[torch.optim.Optimizer]:
    """Returns those that count updates."""
    return part.optimizer.sub_optimizers if is_hybrid(part) else [part.optimizer]


def share_hybrid(part: Any) -> None:
    """Hands the state that was set in a hybrid optimizer on to its inner ones."""
    part.optimizer._sync_hdo_state_to_sub_optimizers()


def take_range(part: DistributedOptimizer, parameter: torch.nn.Parameter, whole: Mapping[str, torch.Tensor]) -> None:
    """Sets this rank's range of a parameter's float32 weights and moments, from the whole of them."""
    span = part._get_model_param_range_map(parameter)["param"]
    # Copies, since the hybrid optimizer keeps what it is given: views would keep the whole.
    own = {key: tensor.flatten()[span.start : span.end].clone() for key, tensor in whole.items()}
    part._set_main_param_and_optimizer_states(parameter, own)
