"""Tests that a colocated run equals, to the last bit, one over gloo in which each service has its own GPUs."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.lockstep_command import NUM_STEPS, LockstepRun, make_workspace, numbers, weights

TRAINER = {"max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}}
MEGATRON: dict[str, dict[str, Any]] = {
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
}


def published(directory: Path) -> dict[int, set[str]]:
    """Returns the digests that each version was published with."""
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as database:
        rows = database.execute("SELECT version, body FROM decisions WHERE kind = 'published'").fetchall()
    return {version: {json.loads(body)["digest"] for other, body in rows if other == version} for version, _ in rows}


SIDE_BY_SIDE = ("rollout.engine.enable_sleep_mode=false", "rollout.engine.gpu_memory_utilization=0.4")


def placed(workspace: Path, placement: str, lent: Sequence[str], *overrides: str) -> Path:
    """Returns the directory of a finished run with this placement, whose workspace is `workspace`."""
    with LockstepRun(workspace, f"placement={placement}", *overrides, *lent) as run:
        assert run.wait() == 0, run.output
        assert ("the engines sleep" in run.log) == (placement == "colocated" and not overrides)
    return workspace


def require_equal(workspace: Path, other: Path, num_steps: int) -> None:
    """Asserts that weights, numbers and batches of the two runs are equal to the last bit.

    The other run may have more steps. Then the digests of what both have published tell that weights are equal.
    """
    stamps, others = (published(directory / "runs" / "run") for directory in (workspace, other))
    assert sorted(stamps) == list(range(num_steps + 1))
    assert all(len(digests) == 1 for digests in stamps.values())
    assert stamps.items() <= others.items()
    assert numbers(workspace) == [line for line in numbers(other) if line["step"] <= num_steps]
    if len(others) == len(stamps):
        assert weights(workspace) == weights(other) != {}
    for version in range(num_steps):
        name = Path("runs") / "run" / "batches" / f"step-{version:06d}.parquet"
        assert pq.read_table(workspace / name).equals(pq.read_table(other / name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "overrides"), [(NUM_STEPS, ()), (2, SIDE_BY_SIDE)], ids=["in turns", "side by side"]
)
def test_placement_changes_no_bit(
    tmp_path: Path, undisturbed: Path, lent: Sequence[str], num_steps: int, overrides: Sequence[str]
) -> None:
    """Compares two FSDP ranks and two replicas that share GPUs with those of a run that nothing disturbs.

    Checkpoints are saved while the engines sleep, after which the same weights are published again.
    """
    workspace = make_workspace(tmp_path, model=str(tmp_path / "model"), num_steps=num_steps)
    require_equal(placed(workspace, "colocated", lent, *overrides), undisturbed, num_steps)


@pytest.mark.long
def test_nor_does_it_with_megatron(tmp_path: Path, lent: Sequence[str]) -> None:
    """Compares two pipeline stages that both send to an engine of two workers, beside a reference."""
    num_steps = 2
    found = []
    for placement in ("colocated", "disaggregated"):
        directory = tmp_path / placement
        directory.mkdir()
        settings = {"num_steps": num_steps, "evaluation": {}, "checkpoint": {"save_freq": 1}, **MEGATRON}
        workspace = make_workspace(directory, model=str(directory / "model"), **settings)
        found.append(placed(workspace, placement, lent[:-1]))  # two ranks are pairs of one engine's two workers
    require_equal(*found, num_steps)
