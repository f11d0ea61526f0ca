"""Tests SFT rows with the chat templates of model families, and with their two kinds of tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.config.sft import SftDataConfig
from services.coordinator.sft.rows import Example, SftDataset
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.text.bridge_families import FAMILIES, make_tokenizer

CASES = [(name, kind) for name, family in FAMILIES.items() for kind in family.kinds if name != "phi-3"]
QUESTION = {"role": "user", "content": "How many clips?"}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Example]:
    """Returns the example that a prompt and a response become."""

    def load(tokenizer: Tokenizer, prompt: str, response: str, **config: Any) -> Example:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": prompt, "response": response}))
        settings = {"train": path, "samples_per_step": 1, **config}
        return SftDataset.load(SftDataConfig(**settings), tokenizer, seed=0).examples[0]

    return load


def read(tokenizer: Tokenizer, tokens: Any) -> str:
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_answer_has_the_tokens_that_it_has_in_the_conversation(load: Callable, name: str, kind: str) -> None:
    tokenizer = FAMILIES[name].tokenizer(kind)
    example = load(tokenizer, QUESTION["content"], "So half as many.", chat=True)
    assert example.prompt_tokens.tolist() == tokenizer.encode(tokenizer.render([QUESTION]))
    whole = [*example.prompt_tokens.tolist(), *example.tokens.tolist()]
    messages = [QUESTION, {"role": "assistant", "content": "So half as many."}]
    rendered = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False))
    assert rendered[: len(whole)] == whole
    assert whole[-1] in tokenizer.eos_token_ids and example.loss_mask.all()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_response_continues_its_prompt(load: Callable, kind: str) -> None:
    tokenizer = make_tokenizer(None, kind=kind)
    example = load(tokenizer, "Q: clips? A:", "half")
    assert example.prompt_tokens.tolist() == tokenizer.encode("Q: clips? A:")
    assert read(tokenizer, example.tokens) == "half</s>"
