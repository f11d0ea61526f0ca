"""Tests that rows with tokens that the tokenizer or the model does not have are bad rows, found before a run starts."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from services.common.config.data import DataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.prompts import PromptDataset
from services.coordinator.text.tokenizer import Tokenizer
from tests.support import ROOT, raises

PROMPTS = ["1+1=", "<new>1+1=", "two+1="]  # the model's 16 tokens are digits, signs and specials


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns the quickstart's model without weights, whose tokenizer got a token that the embedding has no row for."""
    names = shutil.ignore_patterns("*.safetensors")
    model = Path(shutil.copytree(ROOT / "deploy" / "quickstart" / "model", tmp_path / "model", ignore=names))
    content = json.loads((model / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 16, "content": "<new>"} | flags)
    (model / "tokenizer.json").write_text(json.dumps(content))
    return model


@pytest.mark.parametrize("bad_rows", ["fail", "drop"])
def test_rows_with_tokens_that_nobody_has_are_bad(
    tmp_path: Path, model: Path, bad_rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [Tokenizer.load(model).has_token(token) for token in ("1", "<new>")] == [True, False]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in PROMPTS))
    data = DataConfig.model_validate({"train": path, "prompts_per_step": 1, "bad_rows": bad_rows})

    def load() -> PromptDataset:
        return PromptDataset.load(data, Tokenizer.load(model), seed=0)

    if bad_rows == "drop":
        with caplog.at_level(logging.WARNING):
            assert [prompt.text for prompt in load().prompts] == PROMPTS[:1]
        said = caplog.text
    else:
        with raises(InvalidInput, field="data.train") as caught:
            load()
        said = caught.value.message
    assert f"{path} line 2: the tokenizer makes token 16 of '<new>', for which the model has no embedding" in said
    assert f"{path} line 3: the model's tokenizer cannot encode 'two+1='" in said


@pytest.mark.parametrize(
    ("name", "key", "value", "token"),
    [("generation_config.json", "eos_token_id", [1, 99], 99), ("tokenizer_config.json", "eos_token", "<new>", 16)],
)
def test_an_end_token_that_the_model_does_not_have_is_refused_by_its_file(
    model: Path, name: str, key: str, value: object, token: int
) -> None:
    content = json.loads((model / name).read_text()) if (model / name).is_file() else {}
    (model / name).write_text(json.dumps(content | {key: value}))
    with raises(InvalidInput, field="model") as caught:
        Tokenizer.load(model)
    assert f"{model / name}: end token {token} is outside" in caught.value.message
