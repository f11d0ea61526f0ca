"""Updates by real FSDP ranks under several losses: `python -m tests.trainer.loss_lab RANK WORLD DIRECTORY`.

Like tests.trainer.fsdp_lab, of which it has the ranks; rank 0 leaves what came out in DIRECTORY.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from tests.trainer import fsdp_lab
from tests.trainer.fsdp_lab import SMALL, Lab, write

# Name -> changes to fsdp_lab.BASE. Two mini-batches each, so that ratios are not 1; bounds that many tokens meet.
LOSSES: dict[str, dict[str, Any]] = {
    "dual": {"clip_dual": 1.05, "clip_high": 0.02, "kl_coef": 0.1, "kl_kind": "k2"},
    "gspo": {
        "kind": "gspo",
        "gspo": {"clip_low": 0.01, "clip_high": 0.01},
        "aggregation": "seq_mean_token_mean",
        "correction": {"weight": "sequence", "geometric_mask": (0.4, 1.5)},
    },
    "cispo": {
        "kind": "cispo",
        "cispo": {"max_ratio": 1.02},
        "correction": {"weight": "token", "weight_cap": 1.2, "token_mask": (0.1, 5.0), "veto": 0.01},
    },
    "clip_cov": {
        "kind": "clip_cov",
        "clip_cov": {"min_covariance": 0.1},
        "clip_low": 0.02,
        "aggregation": "seq_mean_token_sum",
        "old_logprobs": "engine",
    },
}
UPDATES = {name: {"loss": loss, "num_minibatches": 2} for name, loss in LOSSES.items()}


def samples() -> pa.Table:
    """Those of fsdp_lab with masks, one sample all masked, and an engine that is off by some."""
    table, random = fsdp_lab.samples(), np.random.default_rng(7)
    counts = [len(row) for row in table["tokens"].to_pylist()]
    masks = [(random.random(count) < 0.7).tolist() for count in counts]
    masks[4] = [False] * counts[4]
    logprobs = [[x + float(random.normal(0, 0.5)) for x in row] for row in table["logprobs"].to_pylist()]
    for name, rows in (("loss_mask", masks), ("logprobs", logprobs)):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))
    return table


def run_all(lab: Lab, directory: Path) -> None:
    """Every loss, in one pack per rank and in many."""
    for name, changes in UPDATES.items():
        for size, budget in (("large", {}), ("small", SMALL)):
            lab.open("untied", changes | budget)
            gradients, metrics = lab.gradients_of(samples())
            if lab.rank == 0:
                write(directory, f"{name}-{size}", gradients, metrics)


if __name__ == "__main__":
    _rank, _world, _directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    _lab = Lab(dist.FileStore(str(_directory / "store"), _world), _rank, _world, _directory.parent / "models")
    run_all(_lab, _directory)
    _lab.worker.close()
