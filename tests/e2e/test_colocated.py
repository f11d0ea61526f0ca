"""Tests that a colocated run equals, to the last bit, one over gloo in which each service has its own GPUs."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.lockstep_command import LockstepRun, make_workspace, numbers, weights

NUM_STEPS = 2
TRAINER = {"max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}}
# The checkpoint of every step is saved while the engines sleep, after which the same weights are published again.
SETTINGS = {"num_steps": NUM_STEPS, "evaluation": {}, "checkpoint": {"save_freq": 1}}
CONFIGS: dict[str, dict[str, Any]] = {
    "FSDP, two ranks and two replicas": {"trainer": {**TRAINER, "num_ranks": 2}},
    "Megatron, two pipeline stages that both send, an engine of two workers, a reference": {
        "rollout": {
            "completions_per_prompt": 4,
            "max_model_len": 96,
            "max_samples": 4,
            "sampling": {"max_tokens": 64},
            "tensor_parallel_size": 2,
        },
        "trainer": {
            **TRAINER,
            "num_ranks": 2,
            "strategy": "megatron",
            "megatron": {"pipeline_model_parallel_size": 2},
            "loss": {"kl_coef": 0.1},
        },
    },
}


def published(directory: Path) -> dict[int, set[str]]:
    """Returns the digests that each version was published with."""
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as database:
        rows = database.execute("SELECT version, body FROM decisions WHERE kind = 'published'").fetchall()
    return {version: {json.loads(body)["digest"] for other, body in rows if other == version} for version, _ in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=[pytest.mark.long] * name.startswith("Megatron")) for name in CONFIGS]
)
def test_placement_changes_no_bit(config: str, tmp_path: Path, lent: Sequence[str]):
    workspace = make_workspace(tmp_path, model=str(tmp_path / "model"), **SETTINGS, **CONFIGS[config])
    found = []
    if "tensor_parallel_size" in CONFIGS[config].get("rollout", {}):  # two ranks are pairs of one engine's two workers
        lent = [*lent[:-1]]
    for placement in ("colocated", "disaggregated"):
        with LockstepRun(workspace, f"placement={placement}", *lent) as run:
            assert run.wait() == 0, run.output
            assert ("the engines sleep" in run.log) == (placement == "colocated")
        batches = [
            pq.read_table(run.directory / "batches" / f"step-{version:06d}.parquet") for version in range(NUM_STEPS)
        ]
        found.append((published(run.directory), numbers(workspace), weights(workspace), batches))
        run.directory.rename(tmp_path / placement)
    (stamps, metrics, model, batches), others = found[0], found[1]
    assert sorted(stamps) == list(range(NUM_STEPS + 1))
    assert all(len(digests) == 1 for digests in stamps.values())
    assert (stamps, metrics) == others[:2]
    assert model == others[2] != {}
    for one, other in zip(batches, others[3], strict=True):
        assert one.equals(other)
