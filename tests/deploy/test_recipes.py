"""Tests the runs that ship with the repository: their configs, and the demonstrations for the small models."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.quickstart import make_lookup, make_search
from deploy.quickstart.small_world import World
from services.common.config.load import load
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.coordinator.cli.main import app
from services.coordinator.text.bridge import Bridge
from services.coordinator.text.tokenizer import Tokenizer
from tests.support import ROOT

RUNS = sorted((ROOT / "deploy" / "runs").glob("*.yaml"))
QWEN_3B = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""The shape of Qwen2.5-3B-Instruct."""
SMALL = {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
MIDDLE = {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}
LARGE = {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
LARGE |= {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
EXPERTS |= {"num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
EXPERTS |= {"head_dim": 128, "tie_word_embeddings": False}
QUICKSTART = {"model_type": "qwen3", "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1024}
QUICKSTART |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 16}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_is_a_valid_config(path: Path):
    load(SftConfig if path.stem == "sft" else Config, [str(path)])


def test_search_r1_has_the_plan_that_its_file_promises(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3B))
    path = ROOT / "deploy" / "runs" / "search-r1.yaml"
    result = CliRunner().invoke(app, ["plan", str(path), f"model={tmp_path}", "--device", "gpu"])
    assert result.exit_code == 0, result.output
    text = " ".join(path.read_text().replace("#", "").split())
    promised = "weights 2.87 GiB, gradients 11.50, optimizer 5.75, reference 1.44, peak 27.27"
    assert promised in text and "2.87 11.50 5.75 2.25 x1 3.46 1.44" in " ".join(result.output.split())
    assert "21.56 11.56 27.27" in " ".join(result.output.split())
    assert "1280 samples per mini-batch, 320 on each of 4" in result.output


@pytest.mark.parametrize(
    ("name", "shape", "gpus"),
    [
        ("gsm8k", SMALL, "1x79"),
        ("gsm8k", MIDDLE, "1x79"),
        ("gsm8k-7b", LARGE, "8x79"),
        ("gsm8k-30b-a3b", EXPERTS, "8x79"),
        ("gpu", QUICKSTART, "1x79"),
    ],
    ids=["0.5B", "1.5B", "7B", "30B-A3B", "quickstart"],
)
def test_a_colocated_run_has_the_plan_that_its_file_promises(tmp_path: Path, name: str, shape: dict, gpus: str):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3B | shape))
    path = ROOT / "deploy" / "runs" / f"{name}.yaml"
    args = ["plan", str(path), f"model={tmp_path}"]
    result = CliRunner().invoke(app, [*args, "--device", "gpu"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    both = {cells[0]: cells[-1] for line in result.output.splitlines() if len(cells := line.split()) == 4}
    pinned = " ".join(result.output.partition("Pinned host memory: ")[2].split()[:2])
    promised = f"training {both['train']} GiB, publishing {both['publish']} GiB, pinned host memory {pinned}"
    assert promised in " ".join(path.read_text().replace("#", "").split())
    fits = CliRunner().invoke(app, [*args, "--gpus", gpus], env={"COLUMNS": "200"})
    assert "placement=colocated" in fits.output, fits.output


def test_the_demonstration_looks_up_badly_and_the_model_can_say_all_of_it(tmp_path: Path):
    make_lookup.write_start(str(tmp_path))
    tokenizer, rng = Tokenizer.load(tmp_path), random.Random(0)
    Bridge(tokenizer).check(("tool",))
    conversations = [make_lookup.conversation(rng, "123") for _ in range(2000)]
    lookups = [c for c in conversations if c[1]["content"] == "<lookup>123</lookup>"]
    right = sum(c[-1]["content"] == c[-2]["content"] for c in lookups)
    assert 0.25 < right / len(conversations) < 0.35
    for conversation in conversations[:100]:
        text = tokenizer.render(conversation, add_generation_prompt=False)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_demonstration_searches_badly_and_the_model_can_say_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_search, "NUM_WORLDS", 1)
    make_search.OUT.mkdir(parents=True)
    texts = asyncio.run(make_search.write_demonstrations())
    make_search.write_start("model", texts)
    tokenizer = Tokenizer.load(tmp_path / "model")
    answers = [f"<answer> {question.answer}</answer>" for question in World(make_search.SEED + 1).questions()]
    right = sum(text.endswith(answer) for text, answer in zip(texts[1::2], answers, strict=True))
    assert 0.3 < right / len(answers) < 0.5
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)
