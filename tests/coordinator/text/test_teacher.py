"""Tests which models may be teachers: those whose tokens are the policy's."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput
from services.common.model_card import read_model_card
from services.coordinator.text.cards import require_same_tokens, require_teacher
from tests.support import ROOT, raises

CARD = read_model_card(ROOT / "deploy" / "quickstart" / "model")


def changed(name: str, change: Callable[[Any], None]) -> ModelCard:
    """Returns the card with one file rewritten by another library, after `change` of its content."""
    content = json.loads(CARD.files[name])
    change(content)
    return ModelCard(files={**CARD.files, name: json.dumps(content, indent=3).encode()})


def without(*names: str) -> ModelCard:
    return ModelCard(files={name: content for name, content in CARD.files.items() if name not in names})


def rename(content: Any) -> None:
    vocab = content["model"]["vocab"]
    vocab["sum"] = vocab.pop("7")


def add(content: Any) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": 16, "content": "<think>", **flags})


def lowercase(content: Any) -> None:
    content["normalizer"] = {"type": "Lowercase"}


SAME: dict[str, Callable[[Any], None]] = {
    "written otherwise": lambda content: None,
    "truncates": lambda content: content.update(
        truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    ),
}
OTHER: dict[str, tuple[Callable[[Any], None], str]] = {
    "another token": (rename, "'sum' to the teacher and '7' here"),
    "one more token": (add, "token 16 is '<think>' to the teacher and none here"),
    "another normalizer": (lowercase, "it has another normalizer"),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_tokenizer_is_accepted(case: str) -> None:
    require_teacher(CARD, changed("tokenizer.json", SAME[case]), max_model_len=64)


@pytest.mark.parametrize("case", OTHER)
def test_another_tokenizer_is_refused_with_the_first_difference(case: str) -> None:
    change, difference = OTHER[case]
    with raises(InvalidInput, field="teacher.model") as caught:
        require_teacher(CARD, changed("tokenizer.json", change), max_model_len=64)
    assert difference in caught.value.message


def test_a_reference_may_have_more_tokens_but_no_others() -> None:
    require_same_tokens(CARD, changed("tokenizer.json", add), "reference")
    require_same_tokens(CARD, changed("tokenizer.json", lowercase), "reference")  # it gets tokens, and no text
    require_same_tokens(CARD, without("tokenizer.json"), "reference")
    for policy, other, said in (
        (CARD, changed("tokenizer.json", rename), "'sum' to it and '7' to the policy"),
        (changed("tokenizer.json", add), CARD, "token 16 is none to it and '<think>' to the policy"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(said)) as caught:
            require_same_tokens(policy, other, "critic")
        assert caught.value.metadata["field"] == "critic.model"


def test_models_without_tokenizer_json_are_compared_by_their_files() -> None:
    bare = without("tokenizer.json", "vocab.json", "merges.txt")
    require_teacher(bare, bare, max_model_len=64)
    converted = ModelCard(files={**bare.files, "tokenizer.model": b"one"})
    require_teacher(converted, converted, max_model_len=64)
    others = [bare, ModelCard(files={**bare.files, "tokenizer.model": b"two"})]
    for other, difference in zip(others, ("its files are none", "tokenizer.model has other content"), strict=True):
        with raises(InvalidInput, field="teacher.model") as caught:
            require_teacher(converted, other, max_model_len=64)
        assert difference in caught.value.message


def test_the_teacher_has_positions_for_the_longest_sample() -> None:
    def shorten(content: Any) -> None:
        content["max_position_embeddings"] = 63

    require_teacher(CARD, changed("config.json", shorten), max_model_len=63)
    with raises(InvalidInput, field="teacher.model"):
        require_teacher(CARD, changed("config.json", shorten), max_model_len=64)
