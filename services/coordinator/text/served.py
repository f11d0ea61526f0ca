"""The files with which an exported model serves what it was trained on: chat template and stop tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.types.v1.types_pb2 import ModelCard
from pydantic import JsonValue

from services.common.config.data import FilesConfig
from services.common.files.model_card import write_model_card
from services.coordinator.text.tokenizer import VOCABULARIES, Tokenizer

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
    if _ids(generation.get("eos_token_id")) != stops:
        files[_GENERATION] = _written({**generation, "eos_token_id": stops if len(stops) > 1 else stops[0]})
    return ModelCard(files={name: content for name, content in files.items() if card.files.get(name) != content})


def _defaults(variables: Mapping[str, JsonValue]) -> str:
    """Returns Jinja that sets the variables that are not given."""
    names = ((name, _literal(value)) for name, value in variables.items())
    return "".join(f"{{%- set {name} = {name} if {name} is defined else {value} -%}}\n" for name, value in names)


def _literal(value: JsonValue) -> str:
    """Returns a value as Jinja writes it: JSON, but with none."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _ids(value: JsonValue) -> list[int]:
    return sorted(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))


def _read(card: ModelCard, name: str) -> dict[str, JsonValue]:
    return json.loads(card.files[name]) if name in card.files else {}


def _written(content: Mapping[str, JsonValue]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()
