"""Checks that a teacher can score the policy's tokens: each id must mean the same text to both models."""

import json
from collections.abc import Mapping

import tokenizers
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput
from services.common.files.model_card import vocab_size_of
from services.common.json_values import JsonMapping
from services.coordinator.text.tokenizer import VOCABULARIES

FIELD = "teacher.model"
# What decides how a text becomes tokens. Prompts are rendered by the policy's files, so the template may differ.
_PARTS = ("model", "pre_tokenizer", "normalizer")
# Files from which transformers makes a tokenizer where there is no tokenizer.json.
_OTHERS = (*VOCABULARIES, "merges.txt")


def require_teacher(policy: ModelCard, teacher: ModelCard, *, max_model_len: int, top_k: int = 0) -> None:
    """Checks the teacher's tokenizer, its positions, and that both models have as many tokens as the loss compares.

    Raises:
        InvalidInput: The tokenizers differ, of which the message names the first difference; the teacher was made for
            fewer than `max_model_len` tokens; or a model has fewer than `top_k` tokens.
    """
    if difference := _difference(policy.files, teacher.files):
        raise InvalidInput(
            f"{FIELD}: its tokenizer is not the policy's, so it cannot score the policy's tokens: {difference}; choose "
            "a teacher of the same family, or a policy with the teacher's tokenizer",
            field=FIELD,
        )
    content = json.loads(teacher.files["config.json"])
    longest = (content.get("text_config") or content).get("max_position_embeddings")
    if isinstance(longest, int) and longest < max_model_len:
        raise InvalidInput(
            f"{FIELD}: it has {longest} positions (max_position_embeddings), and a sample may have "
            f"rollout.max_model_len = {max_model_len} tokens; lower that, or choose another teacher",
            field=FIELD,
        )
    vocab_size = min(vocab_size_of(card.files["config.json"]) for card in (policy, teacher))
    if top_k > vocab_size:
        raise InvalidInput(
            f"trainer.loss.distill.top_k {top_k} is above the {vocab_size} tokens of the models: lower it",
            field="trainer.loss.distill.top_k",
        )


def _difference(policy: Mapping[str, bytes], teacher: Mapping[str, bytes]) -> str:
    """Returns how the tokenizers of two model cards differ; "" if they are equal."""
    own, other = (sorted(card.keys() & {*_OTHERS}) for card in (policy, teacher))
    if "tokenizer.json" in own and "tokenizer.json" in other:
        return _difference_of_json(policy["tokenizer.json"], teacher["tokenizer.json"])
    if own != other:
        return f"its files are {_names(other)}, and the policy's {_names(own)}"
    return next((f"{name} has other content" for name in own if policy[name] != teacher[name]), "")


def _names(files: list[str]) -> str:
    return ", ".join(files) or "none"


def _difference_of_json(policy: bytes, teacher: bytes) -> str:
    if policy == teacher:
        return ""
    # Read by the library, because its releases write the same tokenizer in several ways.
    own, other = (tokenizers.Tokenizer.from_buffer(content) for content in (policy, teacher))
    texts, others = ({id_: text for text, id_ in one.get_vocab().items()} for one in (own, other))
    for number in sorted(texts.keys() | others.keys()):
        if texts.get(number) != others.get(number):
            return f"token {number} is {_shown(others.get(number))} to the teacher and {_shown(texts.get(number))} here"
    parts, its_parts = (_parts(one) for one in (own, other))
    return next((f"it has another {name}" for name in _PARTS if parts[name] != its_parts[name]), "")


def _shown(text: str | None) -> str:
    return "none" if text is None else repr(text)


def _parts(tokenizer: tokenizers.Tokenizer) -> JsonMapping:
    return json.loads(tokenizer.to_str())
