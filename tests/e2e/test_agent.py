"""Tests a whole run that trains a model inside of an agent, with real services; its record is verified at the end."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from services.coordinator.verify.session import verify
from tests.e2e.lockstep_command import LockstepRun, invoke, make_sums, numbers
from tests.support import make_model

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 2, 4, 4
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
# Goes on with its conversation once, and then begins another, the second time depending on what the model has said.
_AGENT = """
import json, urllib.request

def run(row, seed, url, key):
    def ask(messages):
        body = json.dumps({"messages": messages, "temperature": 0.01}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

    first = [{"role": "user", "content": row["prompt"]}]
    said = ask(first)
    last = ask([*first, said, {"role": "user", "content": "1+1="}])
    if len(said["content"]) % 2:
        last = ask([{"role": "user", "content": "2+2="}])
    return last["content"]
"""
_SCORER = "def score(*, completion, extra, **_):\n    return len(completion) % 3 + extra['agent']['exit_code']\n"


def test_an_agent_is_trained_from_exactly_the_tokens_that_its_calls_sampled(tmp_path: Path, lent: Sequence[str]):
    make_sums(tmp_path / "data")
    (tmp_path / "solver.py").write_text(_AGENT)
    (tmp_path / "scorer.py").write_text(_SCORER)
    (tmp_path / "template.jinja").write_text(_TEMPLATE)
    config = {
        "name": "run",
        "model": str(make_model(tmp_path / "model", "untied")),
        "num_steps": NUM_STEPS,
        "data": {
            "train": "data/train.parquet",
            "eval": {"test": "data/test.parquet"},
            "prompts_per_step": NUM_PROMPTS,
            "max_prompt_tokens": 8,
            "chat_template": "template.jinja",
        },
        "rollout": {
            "num_replicas": 1,
            "completions_per_prompt": NUM_SAMPLES,
            "max_model_len": 64,
            "max_samples": 8,
            "sampling": {"max_tokens": 5, "top_k": 20},
        },
        "environment": {"kind": "agent", "path": "solver:run", "num_workers": 1, "on_failure": "fail"},
        "reward": {"scorers": [{"kind": "python", "path": "scorer:score"}], "on_failure": "fail"},
        "trainer": {
            **{"num_ranks": 2, "max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}},
            "loss": {"aggregation": "seq_mean_token_mean"},
        },
        "evaluation": {"eval_freq": 2},
        "checkpoint": {"save_freq": 0, "export_at_end": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with LockstepRun(tmp_path, *lent[:2]) as run:
        assert run.wait() == 0, run.output + run.log
    steps = [line for line in numbers(tmp_path) if "reward/mean" in line]
    assert len(steps) == NUM_STEPS
    # float32 in engine and trainer, as in tests/rollout.
    assert all(line["train/logprob_diff_max"] <= 1e-4 and line["train/grad_norm"] > 0 for line in steps)
    assert all(line["batch/samples"] == NUM_PROMPTS * NUM_SAMPLES for line in steps)
    assert any(1 < line["agent/segments_mean"] < 2 for line in steps)
    for path in sorted((run.directory / "batches").glob("step-??????.parquet")):
        rows = pq.read_table(path).to_pylist()
        episodes = [list(some) for _, some in groupby(rows, lambda row: (row["group"], row["sample"]))]
        assert len(episodes) == NUM_PROMPTS * NUM_SAMPLES
        for segments in episodes:
            assert [row["segment"] for row in segments] == list(range(len(segments)))
            assert [len(row["turn_begins"]) for row in segments] == [2, 1][: len(segments)]
            assert [call["parent"] for call in segments[0]["calls"]] == [None, 0]
            assert all(any(row["advantages"]) or row["reward"] == segments[0]["reward"] for row in segments)
    for what, compared in (("calls", "tokens of"), ("rewards", f"rewards of {NUM_PROMPTS * NUM_SAMPLES} samples: all")):
        done = invoke("replay", "runs/run", "--step", 2, "--what", what, cwd=tmp_path)
        assert done.returncode == 0 and compared in done.stdout and "step 2: identical" in done.stdout, done.stdout
    calls = run.directory / "batches" / "step-000000.calls.parquet"
    calls.write_bytes(calls.read_bytes() + b" ")
    assert "step-000000.calls.parquet is not the file that was recorded" in verify(run.directory).violation
    calls.unlink()
    assert "step-000000.calls.parquet, of a row collected of version 0, is missing" in verify(run.directory).violation
