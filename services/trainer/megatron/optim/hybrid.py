"""Megatron's optimizer in two parts: a share of the weights is updated by the processor, its state in host memory."""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def is_hybrid(part: Any) -> bool:
    """Whether this is `optimizer_cpu_offload`'s."""
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
    """Those that count updates."""
    return part.optimizer.sub_optimizers if is_hybrid(part) else [part.optimizer]
