"""Megatron's learning rate and weight decay, to compare ours with.

It is a harness only to be forked from a process that has imported Megatron, which takes seconds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from services.common.config.optim import OptimConfig

NUM_STEPS = 450
STYLES = {"inverse_square_root": "inverse-square-root", "wsd": "WSD"}


def table(config: OptimConfig) -> list[tuple[float, float]]:
    end = config.weight_decay if config.weight_decay_end is None else config.weight_decay_end
    # As the group's own settings, for the constructor refuses a weight decay that falls.
    group: dict[str, Any] = {"start_wd": config.weight_decay, "end_wd": end}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=config.lr * config.warmup_init_ratio,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or NUM_STEPS,
        lr_decay_style=STYLES.get(config.schedule, config.schedule),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=config.weight_decay_steps or NUM_STEPS,
        wd_incr_style=config.weight_decay_schedule,
        wsd_decay_steps=config.wsd_decay_steps,
        lr_wsd_decay_style=config.wsd_decay_style,
    )
    rows = []
    for _ in range(NUM_STEPS):
        rows.append((group["lr"], group["weight_decay"]))
        scheduler.step(1)
    return rows


def main(file: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes {name: [[lr, weight_decay] of num_steps 0, 1, 2, ...]} as JSON."""
    file.write_text(json.dumps({name: table(OptimConfig(**fields)) for name, fields in configs.items()}))
