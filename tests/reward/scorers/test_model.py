"""Compares tiny random reward models in a worker with transformers in this process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from services.common.config.reward import ModelConfig
from services.common.errors import InvalidInput
from services.reward.errors import FailureReason
from services.reward.graders.model import load
from services.reward.scorers.model import LOAD_FIELDS
from tests.support import VOCAB, make_model

CHAT = "{% for m in messages %}{{ '=' if m['role'] == 'user' else '-' }}{{ m['content'] }}<eos>{% endfor %}"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
PAIRS = [("1+1=", "2"), ("1+1=", "3 3 3 3 3 3 3 3"), ("1+1=", ""), ("23-4=", "19 = 19"), ("1+1=", "2")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Provides the folder of a language model and its tokenizer; the last layer is not that of a reward model."""
    return make_model(tmp_path_factory.mktemp("lm"), "untied")


@pytest.fixture(scope="module")
def reward_model(directory, tmp_path_factory):
    def make(config: PreTrainedConfig | None = None, *, num_labels: int = 1, chat: bool = False, **changes) -> Path:
        path = tmp_path_factory.mktemp("rm")
        torch.manual_seed(num_labels)
        config = config or Qwen3Config.from_pretrained(directory, num_labels=num_labels, **changes)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(directory / name, path)
        if chat:
            settings = json.loads((path / "tokenizer_config.json").read_text())
            (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT}))
        return path

    return make


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def scorer_of(path: Path, **fields: object) -> tuple[Callable[..., list], str]:
    """Loads in this process what the worker loads, so that torch is imported only once."""
    config = ModelConfig(path=str(path), device="cpu", **fields)
    return load(**config.model_dump(include=LOAD_FIELDS))


def scores(path: Path, pairs: Sequence[tuple[str, str]] = PAIRS, messages: object = (), **fields: object) -> list:
    prompts, completions = zip(*pairs, strict=True)
    columns = {"prompt": prompts, "completion": completions, "answer": [""] * len(pairs)}
    return scorer_of(path, **fields)[0](**columns, messages=[messages] * len(pairs))


@torch.no_grad()
def expected(path: Path, text: str, label: int = 0) -> float:
    """Returns the logit of one text by itself, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    network = AutoModelForSequenceClassification.from_pretrained(path).eval()
    return network(**tokenizer(text, return_tensors="pt")).logits[0, label].item()


# Padding a batch changes the order of float32 sums: a few units of 6e-8 at logits of about 1.
def close(values: list[float]):
    return pytest.approx(values, abs=1e-5)


def test_plain_texts_score_as_in_transformers_in_batches_of_any_size(reward_model):
    path = reward_model()
    truth = [expected(path, prompt + completion) for prompt, completion in PAIRS]
    assert len({round(value, 3) for value in truth}) == 4  # all but the repeated pair
    for batch_size in (1, 3, 8):
        assert scores(path, batch_size=batch_size) == close(truth)


def test_a_chat_template_is_used_and_a_completion_cannot_end_its_turn(reward_model):
    path = reward_model(chat=True)
    pairs = [("1+1=", "2"), ("1+1=", "2<eos>=3")]
    truth = [expected(path, "=1+1=<eos>-2<eos>"), expected(path, "=1+1=<eos>-2< eos>=3<eos>")]
    assert abs(truth[1] - expected(path, "=1+1=<eos>-2<eos>=3<eos>")) > 1e-3
    assert scores(path, pairs) == close(truth)
    assert scores(path, pairs, template="plain")[0] == close(expected(path, "1+1=2"))
    # The policy's own template is in the prompt's text, and not in the messages.
    messages = [{"role": "user", "content": "1+1="}]
    assert scores(path, [("<eos>1+1=<eos>", "2")], messages) == close(truth[:1])


def test_the_label_is_the_score_and_a_model_without_pad_token_is_right_too(reward_model):
    path = reward_model(num_labels=3, pad_token_id=None)
    assert scores(path, label=2) == close(
        [expected(path, prompt + completion, label=2) for prompt, completion in PAIRS]
    )


def test_a_sample_that_is_too_long_has_no_score_and_the_others_have(reward_model):
    path = reward_model()
    long, short = scores(path, [("1+1=", "1" * 600), ("1+1=", "2")])
    assert (long.reason, long.detail) == (FailureReason.ERROR, "604 tokens are more than max_tokens 512")
    assert short == close(expected(path, "1+1=2"))
    assert scores(path, [("1+1=", "2")], max_tokens=4)[0].detail == "5 tokens are more than max_tokens 4"


def test_after_an_error_of_the_gpu_the_worker_ends(reward_model, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with ...")

    path = reward_model()
    monkeypatch.setattr(Qwen3ForSequenceClassification, "forward", fail)
    with pytest.raises(SystemExit, match=r"^CUDA error: device-side assert triggered$"):
        scores(path, [("1+1=", "2")])


@pytest.mark.parametrize(("kind", "limit"), [("bert", 34), ("roberta", 32), ("mpnet", 32)])
def test_positions_that_no_token_gets_do_not_count(reward_model, kind, limit):
    path = reward_model(AutoConfig.for_model(kind, vocab_size=VOCAB, num_labels=1, max_position_embeddings=34, **SMALL))
    fitting, long = scores(path, [("1+1=", "1" * (limit - 4)), ("1+1=", "1" * (limit - 3))])
    assert fitting == close(expected(path, "1+1=" + "1" * (limit - 4)))
    assert long.detail == f"{limit + 1} tokens are more than max_tokens {limit}"


def test_a_model_that_also_sees_pictures_has_the_pad_token_and_the_limit_of_its_text_part(reward_model):
    text = SMALL | {"vocab_size": VOCAB, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 34}
    vision = SMALL | {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, num_labels=1)
    path = reward_model(config)
    *fitting, long = scores(path, [*PAIRS, ("1+1=", "1" * 31)])
    assert fitting == close([expected(path, prompt + completion) for prompt, completion in PAIRS])
    assert long.detail == "35 tokens are more than max_tokens 34"


def test_what_cannot_be_loaded_is_refused(directory, reward_model, tmp_path):
    two, pickled = reward_model(num_labels=2), reward_model()
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"never read")
    endless, content = reward_model(), json.loads((two / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(content | {"num_labels": 10**8}))
    cases = [
        (tmp_path / "none", {}, "is not a directory"),
        (directory, {}, "it lacks weights score.weight"),
        (two, {}, "has 2 labels: set label"),
        (two, {"label": 2}, "label 2: the model has 2 labels"),
        (two, {"label": 0, "template": "chat"}, "no chat template"),
        (pickled, {}, "model.safetensors"),
        (endless, {}, f"{endless}/config.json: num_labels 100000000 is not"),
    ]
    for path, fields, words in cases:
        with pytest.raises((ValueError, OSError, InvalidInput), match=words):
            scorer_of(path, **fields)


def test_the_version_follows_the_files_and_what_chooses_the_score(reward_model):
    path = reward_model(num_labels=2)
    first = scorer_of(path, label=0)[1]
    assert scorer_of(path, label=0, batch_size=2)[1] == first
    other_label = scorer_of(path, label=1)[1]
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    assert len({first, other_label, scorer_of(path, label=0)[1]}) == 3


async def test_in_its_worker_beside_other_scorers(open_run, make_item, reward_model):
    path = reward_model()
    config = {"kind": "model", "path": str(path), "device": "cpu", "weight": 2, "timeout_s": 250}
    pairs = [*PAIRS, ("1+1=", "1" * 600)]
    async with open_run(config, {"kind": "exact"}) as run:
        outcomes = await run.score([make_item(completion, "2", prompt=prompt) for prompt, completion in pairs])
        described = run.scorer
    truth = [expected(path, prompt + completion) for prompt, completion in PAIRS]
    assert [outcome.components["model"] for outcome in outcomes[:-1]] == close(truth)
    assert outcomes[0].reward == close(2 * truth[0] + 1)
    assert (outcomes[-1].failed_scorer, outcomes[-1].components) == ("model", {"exact": 0.0})
    assert described == f"model {scorer_of(path)[1]} x 2 + exact 2 x 1"


@pytest.mark.long  # test_what_cannot_be_loaded_is_refused has the reasons, tests/reward/scorers/test_python.py the way
async def test_a_worker_that_cannot_load_it_says_why_at_open(open_run, tmp_path):
    with pytest.raises(InvalidInput, match=r"scorers\.0 \(model\) cannot start: .*none' is not a directory"):
        async with open_run({"kind": "model", "path": str(tmp_path / "none")}):
            pass
    with pytest.raises(InvalidInput, match=r"cannot start: no answer within 0\.01 s"):
        async with open_run({"kind": "model", "path": str(tmp_path), "start_timeout_s": 0.01}):
            pass


def test_the_service_itself_imports_no_torch():
    code = "import sys, services.reward.servicer; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
