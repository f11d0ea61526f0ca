"""Model cards: the files with which an exported model serves what it was trained on (chat template and stop tokens),
and whether a teacher can score the policy's tokens, for which each id must mean the same text to both models.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from lockstep.types.v1.types_pb2 import ModelCard
from pydantic import JsonValue

from services.common.config.data import FilesConfig
from services.common.errors import InvalidInput
from services.common.model_card import vocab_size_of, write_model_card
from services.coordinator.text.tokenizer import VOCABULARIES, Tokenizer, token_ids

_TEMPLATE, _TOKENIZER, _GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"


def served_files(card: ModelCard, data: FilesConfig) -> ModelCard:
    """Returns the files that differ from those of the starting model's `card`.

    Both places of a chat template, chat_template.jinja and the key in tokenizer_config.json, get the one that prompts
    were rendered with. `chat_template_kwargs` become defaults of its variables. generation_config.json gets all stop
    tokens that ended a sample.

    Raises:
        LockstepError: See Tokenizer.load.
    """
    if not card.files.keys() & set(VOCABULARIES):  # the model has no tokenizer, so it has no template either
        return ModelCard()
    with TemporaryDirectory(prefix="lockstep-served-") as directory:
        write_model_card(card, Path(directory))
        tokenizer = Tokenizer.load(Path(directory), chat_template=data.chat_template, date=data.template_date)
    files: dict[str, bytes] = {}
    if tokenizer.template_source is not None:
        source = _defaults(data.chat_template_kwargs) + tokenizer.template_source
        files[_TEMPLATE] = source.encode()
        files[_TOKENIZER] = _written({**_read(card, _TOKENIZER), "chat_template": source})
    generation, config = _read(card, _GENERATION), _read(card, "config.json")
    if not generation:  # transformers makes one from config.json
        generation = {key: config[key] for key in ("bos_token_id", "pad_token_id", "eos_token_id") if key in config}
    stops: list[JsonValue] = [*tokenizer.eos_token_ids]
    if sorted(token_ids(generation.get("eos_token_id"))) != stops:
        files[_GENERATION] = _written({**generation, "eos_token_id": stops if len(stops) > 1 else stops[0]})
    return ModelCard(files={name: content for name, content in files.items() if card.files.get(name) != content})


def _defaults(variables: Mapping[str, JsonValue]) -> str:
    names = ((name, _literal(value)) for name, value in variables.items())
    return "".join(f"{{%- set {name} = {name} if {name} is defined else {value} %}}\n" for name, value in names)


def _literal(value: JsonValue) -> str:
    """Returns a value as Jinja writes it: JSON, but with none."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _read(card: ModelCard, name: str) -> dict[str, JsonValue]:
    return json.loads(card.files[name]) if name in card.files else {}


def _written(content: Mapping[str, JsonValue]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()


_FIELD = "teacher.model"
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
            f"{_FIELD}: its tokenizer is not the policy's, so it cannot score the policy's tokens: {difference}; "
            "choose a teacher of the same family, or a policy with the teacher's tokenizer",
            field=_FIELD,
        )
    content = json.loads(teacher.files["config.json"])
    longest = (content.get("text_config") or content).get("max_position_embeddings")
    if isinstance(longest, int) and longest < max_model_len:
        raise InvalidInput(
            f"{_FIELD}: it has {longest} positions (max_position_embeddings), and a sample may have "
            f"rollout.max_model_len = {max_model_len} tokens; lower that, or choose another teacher",
            field=_FIELD,
        )
    vocab_size = min(vocab_size_of(card.files["config.json"]) for card in (policy, teacher))
    if top_k > vocab_size:
        raise InvalidInput(
            f"trainer.loss.distill.top_k {top_k} is above the {vocab_size} tokens of the models: lower it",
            field="trainer.loss.distill.top_k",
        )


def require_same_tokens(policy: ModelCard, other: ModelCard, role: str) -> None:
    """Checks that the reference or critic has every token of the policy, if both have a tokenizer.json. One that was
    added to the policy may be a row without a name.

    Raises:
        InvalidInput: A token is another one, or beyond its vocabulary; names the first.
    """
    content, its_content = (card.files.get("tokenizer.json") for card in (policy, other))
    if content is None or its_content is None or content == its_content:
        return
    texts, others = (_texts(tokenizers.Tokenizer.from_buffer(one)) for one in (content, its_content))
    vocab_size = vocab_size_of(other.files["config.json"])
    for number in sorted(texts):
        if texts[number] != others.get(number) and (number in others or number >= vocab_size):
            seen = f"token {number} is {_quoted(others.get(number))} to it and {_quoted(texts[number])} to the policy"
            raise InvalidInput(
                f"{role}.model: {seen}, so it would read other text than the policy: choose a model with the policy's "
                "tokenizer",
                field=f"{role}.model",
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
    texts, others = _texts(own), _texts(other)
    for number in sorted(texts.keys() | others.keys()):
        if texts.get(number) != others.get(number):
            return (
                f"token {number} is {_quoted(others.get(number))} to the teacher and {_quoted(texts.get(number))} here"
            )
    parts, its_parts = (json.loads(one.to_str()) for one in (own, other))
    return next((f"it has another {name}" for name in _PARTS if parts[name] != its_parts[name]), "")


def _texts(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    return {number: text for text, number in tokenizer.get_vocab().items()}


def _quoted(text: str | None) -> str:
    return "none" if text is None else repr(text)
