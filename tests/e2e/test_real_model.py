"""Runs the recipe deploy/runs/smollm2.yaml with SmolLM2-135M-Instruct, a real model with a chat template.

Needs data/smollm2 and data/chain_sum; the recipe says how to make them. Takes minutes and 8 GB of memory.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.lockstep_command import invoke
from tests.support import ROOT

MODEL, DATA = ROOT / "data" / "smollm2", ROOT / "data" / "chain_sum"
NUM_STEPS = 2

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="deploy/quickstart/smollm2.py makes data/smollm2"),
    pytest.mark.skipif(not DATA.is_dir(), reason="deploy/runs/smollm2.yaml says how to make data/chain_sum"),
]


def test_it_trains_and_is_exported(tmp_path: Path) -> None:
    arguments = [
        f"model={MODEL}",
        f"data.train={DATA / 'train.parquet'}",
        f"data.eval={{held-out: {DATA / 'test.parquet'}}}",
        "data.prompts_per_step=4",
        f"num_steps={NUM_STEPS}",
        f"runs_dir={tmp_path}",
    ]
    done = invoke("run", ROOT / "deploy" / "runs" / "smollm2.yaml", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "smollm2"
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    # float32 on both sides, 30 layers and a vocabulary of 49,152: seen 6e-5.
    gaps = [step["train/logprob_diff_max"] for step in steps if "train/logprob_diff_max" in step]
    assert len(gaps) == NUM_STEPS and max(gaps) < 1e-3
    before, after = (load_file(next(path.glob("*.safetensors"))) for path in (MODEL, directory / "model"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    assert any(character.isdigit() for character in tokenizer.decode(answer))
