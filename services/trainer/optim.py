"""AdamW's parameter groups and the learning rate of each update."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from services.common.config.trainer import OptimConfig


def learning_rate(config: OptimConfig, update: int) -> float:
    """Learning rate of the optimizer update number `update`, counted from 0 over the whole run."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant" or config.decay_steps is None:
        return config.lr
    done = min(1.0, (update - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def make_adamw(config: OptimConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.AdamW:
    """AdamW that decays matrices only, not norms and biases."""
    matrices, vectors = [], []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
