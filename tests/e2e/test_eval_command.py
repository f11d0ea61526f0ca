"""Tests `lockstep eval` with real services: it serves the given model, and its numbers follow from the samples."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.e2e.lockstep_command import invoke
from tests.support import ROOT

QUICKSTART = ROOT / "deploy" / "quickstart" / "model"
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 24, 4, 8


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a workspace with the files of a run, and a config that names another model, which does not exist."""
    directory = tmp_path_factory.mktemp("eval")
    made = invoke("data", "arithmetic", "--out", "data", "--num-train", 8, "--num-test", 64, cwd=directory)
    assert made.returncode == 0, made.stderr
    sampled = {"temperature": 1.0, "num_samples": NUM_SAMPLES, "pass_k": [1, 4], "max_prompts": NUM_PROMPTS}
    config = {
        "model": "no-such-model",
        "data": {
            "train": "data/no-such-file.parquet",
            "eval": {"sampled": "data/test.parquet", "greedy": "data/test.parquet"},
            "prompts_per_step": 8,
            "max_prompt_tokens": 16,
        },
        "rollout": {"completions_per_prompt": 4, "max_model_len": 64, "sampling": {"max_tokens": MAX_TOKENS}},
        "reward": {"scorers": [{"kind": "exact"}], "num_workers": 1},
        "trainer": {"num_ranks": 2},
        "evaluation": {"sets": {"sampled": sampled, "greedy": {"max_prompts": NUM_PROMPTS}}},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    (directory / "runs" / "run").mkdir(parents=True)
    for name in ("ledger.sqlite", "config.json", "metrics.jsonl"):
        (directory / "runs" / "run" / name).write_text("the run's own")
    return directory


def greedy_completions(prompts: list[list[int]]) -> list[list[int]]:
    """Returns the completions as transformers decodes them, with the end token where one is reached."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    completions = []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            while len(ids) < len(prompt) + MAX_TOKENS and (len(ids) == len(prompt) or ids[-1] != eos):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            completions.append(ids[len(prompt) :])
    return completions


def by_prompt(samples: pa.Table) -> np.ndarray:
    """Returns the rewards [prompts, samples]."""
    assert samples["group"].to_pylist() == sorted(samples["group"].to_pylist())
    return samples["reward"].to_numpy().reshape(NUM_PROMPTS, -1)


def test_a_model_directory_with_two_sets(workspace: Path, lent: Sequence[str]):
    done = invoke("eval", QUICKSTART, "run.yaml", "--out", "runs/run/final", *lent[:2], cwd=workspace)
    assert done.returncode == 0, done.stderr + done.stdout
    assert sorted(path.name for path in (workspace / "runs" / "run").iterdir()) == [
        "config.json",
        "final",
        "ledger.sqlite",
        "metrics.jsonl",
    ]
    for name in ("ledger.sqlite", "config.json", "metrics.jsonl"):
        assert (workspace / "runs" / "run" / name).read_text() == "the run's own"

    out = workspace / "runs" / "run" / "final"
    result = json.loads((out / "metrics.json").read_text())
    metrics = result["metrics"]
    sampled, greedy = (
        pq.read_table(out / "evaluations" / f"{name}-step-000000.parquet") for name in ("sampled", "greedy")
    )
    assert (result["checkpoint"], result["version"]) == (str(QUICKSTART), 0)
    assert set(sampled["policy_digest"].to_pylist()) == set(greedy["policy_digest"].to_pylist()) == {result["digest"]}
    assert len(result["digest"]) == 2 * hashlib.blake2b(digest_size=16).digest_size

    assert greedy["tokens"].to_pylist() == greedy_completions(greedy["prompt_tokens"].to_pylist())
    assert metrics["eval/greedy/reward"] == pytest.approx(by_prompt(greedy).mean(), abs=1e-12)
    rewards = by_prompt(sampled)
    assert rewards.shape == (NUM_PROMPTS, NUM_SAMPLES)
    assert metrics["eval/sampled/reward"] == pytest.approx(rewards.mean(), abs=1e-12)
    # Rewards are 0 or 1: pass@1 is their mean, pass@n the share of prompts with any.
    assert metrics["eval/sampled/pass@1"] == pytest.approx(rewards.mean(), abs=1e-12)
    assert metrics["eval/sampled/pass@4"] == pytest.approx(rewards.max(axis=1).mean(), abs=1e-12)
    # The model as it ships is right half of the time, here within five standard deviations of a share of 24 prompts. So
    # samples of a prompt differ.
    for name in ("greedy", "sampled"):
        assert abs(metrics[f"eval/{name}/reward"] - 0.5) < 5 * math.sqrt(0.25 / NUM_PROMPTS)
    assert len(set(sampled["seed"].to_pylist())) == sampled.num_rows
    assert metrics["eval/sampled/pass@4"] > metrics["eval/sampled/pass@1"]

    for text in ("sampled", "greedy", "pass@4", f"{metrics['eval/sampled/reward']:.3f}", "runs/run/final"):
        assert text in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
