"""Tests that two undisturbed runs of one config are equal to the last bit, regardless of the order of arrival."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.lockstep_command import LockstepRun, make_workspace, numbers

NUM_STEPS = 2
ROLLOUT = {
    "num_replicas": 2,
    "completions_per_prompt": 4,
    "max_model_len": 48,
    "max_samples": 4,
    "sampling": {"max_tokens": 16},
}
TRAINER = {"num_ranks": 2, "max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}}
CONFIGS: dict[str, dict[str, Any]] = {
    "Megatron: PPO with a KL penalty, LoRA and a KL loss": {
        "advantage": {"kind": "gae", "kl": {"coef": 0.1}},
        "trainer": {**TRAINER, "strategy": "megatron", "lora": {"rank": 4}, "loss": {"kl_coef": 0.1}},
        "critic": {"optim": {"lr": 1e-2}},
    },
    "FSDP: experts, and GRPO with a KL loss": {"trainer": {**TRAINER, "loss": {"kl_coef": 0.1}}},
}


def digests(directory: Path) -> list[str]:
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as database:
        rows = database.execute("SELECT version, body FROM decisions WHERE kind = 'published' ORDER BY seq").fetchall()
    assert [version for version, _ in rows] == list(range(NUM_STEPS + 1))
    return [body for _, body in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=pytest.mark.long) if "FSDP" in name else name for name in CONFIGS]
)
def test_two_runs_are_equal_to_the_last_bit(config: str, tmp_path: Path, lent: Sequence[str]):
    settings = {"num_steps": NUM_STEPS, "rollout": ROLLOUT, "evaluation": {}, "checkpoint": {"export_at_end": False}}
    kind = "moe" if "experts" in config else "untied"
    workspace = make_workspace(tmp_path, kind=kind, model=str(tmp_path / "model"), **settings, **CONFIGS[config])
    found = []
    for _ in range(2):
        with LockstepRun(workspace, *lent) as run:
            assert run.wait() == 0, run.output
        batches = [
            pq.read_table(run.directory / "batches" / f"step-{version:06d}.parquet") for version in range(NUM_STEPS)
        ]
        found.append((digests(run.directory), numbers(workspace), batches))
        run.directory.rename(tmp_path / f"run-{len(found)}")
    (first, first_numbers, first_batches), (second, second_numbers, second_batches) = found
    assert first == second
    assert first_numbers == second_numbers
    # In float32 the trainer's routers choose what the engine chose.
    agreements = [row["train/moe_router_agreement"] for row in first_numbers if "train/moe_router_agreement" in row]
    assert agreements == ([1.0] * NUM_STEPS if kind == "moe" else [])
    for one, other in zip(first_batches, second_batches, strict=True):
        assert one["ref_logprobs"].null_count == 0
        assert one["routed_experts"].null_count == (0 if kind == "moe" else one.num_rows)
        assert one.equals(other)
