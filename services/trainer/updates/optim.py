"""Builds the optimizers, and computes the learning rate and weight decay of each update."""

import math
from collections.abc import Callable, Iterable

import torch

from services.common.config.optim import OptimConfig

# Each maps the share of the decay that is done, 0 to 1, to (lr - last lr) / (peak lr - last lr), 1 to 0.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}


def learning_rate(config: OptimConfig, update: int) -> float:
    """Returns the learning rate of optimizer update number `update`, counted from 0 over the whole run.

    It equals megatron.core's OptimizerParamScheduler.get_lr at num_steps = update + 1 during the warm-up
    (update < warmup_steps), and at num_steps = update afterwards. So no update has a learning rate of 0, and two
    updates have the peak: the last of the warm-up and the first after it.

    As in Megatron, inverse_square_root does not decay smoothly to lr * min_lr_ratio: up to decay_steps this is only a
    lower bound, and after decay_steps it is the learning rate.
    """
    if update < config.warmup_steps:
        first = config.lr * config.warmup_init_ratio
        return first + (config.lr - first) * (update + 1) / config.warmup_steps
    if config.schedule == "constant" or config.decay_steps is None:
        return config.lr
    last = config.lr * config.min_lr_ratio
    if update > config.decay_steps:
        return last
    if config.schedule == "inverse_square_root":
        return max(last, config.lr * math.sqrt(max(config.warmup_steps, 1) / max(update, 1)))
    shape, start = config.schedule, config.warmup_steps
    if config.schedule == "wsd" and config.wsd_decay_steps is not None:
        shape, start = config.wsd_decay_style, config.decay_steps - config.wsd_decay_steps
    done = max(0, update - start) / (config.decay_steps - start)
    return last + (config.lr - last) * _SHAPES[shape](done)


def weight_decay(config: OptimConfig, update: int) -> float:
    """Returns the weight decay of update number `update`: OptimizerParamScheduler.get_wd at num_steps = update."""
    start, end, steps = config.weight_decay, config.weight_decay_end, config.weight_decay_steps
    if end is None or steps is None:
        return start
    if update > steps:
        return end
    return start + (end - start) * _SHAPES[config.weight_decay_schedule](1 - update / steps)


def make_optimizers(
    config: OptimConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], layers: str
) -> list[torch.optim.Optimizer]:
    """Returns AdamW, and with `kind` muon, Muon for the matrices whose names begin with `layers`.

    Matrices decay, norms and biases do not: by weight_decay * group["wd_mult"] per group.
    """
    hidden, matrices, vectors = [], [], []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not name.endswith("bias")  # those of experts are a row per expert
            is_hidden = config.kind == "muon" and is_matrix and parameter.ndim == 2 and name.startswith(layers)
            (hidden if is_hidden else matrices if is_matrix else vectors).append(parameter)

    def groups(*parts: tuple[list[torch.nn.Parameter], float]) -> list[dict[str, object]]:
        decay = config.weight_decay
        return [{"params": part, "weight_decay": decay * mult, "wd_mult": mult} for part, mult in parts if part]

    optimizers: list[torch.optim.Optimizer] = []
    if some := groups((matrices, 1.0), (vectors, 0.0)):
        optimizers.append(torch.optim.AdamW(some, lr=config.lr, betas=config.betas, eps=config.eps, fused=True))
    if some := groups((hidden, 1.0)):
        optimizers.append(torch.optim.Muon(some, lr=config.lr, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
    return optimizers
