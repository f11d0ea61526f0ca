"""Tests that the quickstart learns with a tensor-parallel Megatron trainer as it does with FSDP."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.lockstep_command import invoke
from tests.support import ROOT

DEPLOY = ROOT / "deploy"


@pytest.mark.long
def test_the_quickstart_learns_on_megatron(tmp_path: Path, lent: Sequence[str]):
    made = invoke("data", "arithmetic", "--out", "data/arithmetic", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    ended = invoke(
        *(
            "run",
            *lent[:2],
            DEPLOY / "runs" / "quickstart.yaml",
            f"model={DEPLOY / 'quickstart' / 'model'}",
            "name=run",
        ),
        *("trainer.strategy=megatron", "trainer.megatron.tensor_model_parallel_size=2"),
        *("num_steps=10", "rollout.num_replicas=1", "checkpoint={save_freq: 0, export_at_end: false}"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    accuracies = [row["eval/held-out/reward"] for row in rows if "eval/held-out/reward" in row]
    # FSDP comes from 0.49 to 0.94 and more in ten steps, with any of three seeds.
    assert accuracies[0] < 0.52 and accuracies[-1] > 0.9
    assert max(row["train/logprob_diff_max"] for row in rows if "train/logprob_diff_max" in row) < 1e-4
