"""Reads and writes model cards: the small files of a model, without weights, that an engine and a tokenizer need.

The trainer reads them from its model directory, so rollout and coordinator need neither a copy of the model nor access
to the Hugging Face hub.
"""

import json
from pathlib import Path

from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput, NotFound

_REQUIRED = "config.json"
_OPTIONAL = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def read_model_card(model_path: str | Path) -> ModelCard:
    """Returns the card of a model directory.

    Raises:
        NotFound: The directory does not exist or has no config.json.
        InvalidInput: A file is a link out of the directory, config.json or tokenizer_config.json is not a JSON object,
            or one of them asks to run code that comes with the model (`auto_map`), which is never run.
    """
    directory = Path(model_path)
    if not directory.is_dir():
        raise NotFound(f"model: directory {directory} does not exist", field="model")
    if not (directory / _REQUIRED).is_file():
        raise NotFound(f"model: {directory} has no {_REQUIRED}", field="model")
    names = [_REQUIRED, *(name for name in _OPTIONAL if (directory / name).is_file())]
    for name in names:
        _refuse_link_out(directory / name)
    card = ModelCard(files={name: (directory / name).read_bytes() for name in names})
    _refuse_code(card, directory)
    return card


def write_model_card(card: ModelCard, directory: Path) -> None:
    """Writes the card's files into `directory`.

    Raises:
        InvalidInput: The card has an unexpected file, or asks to run code that comes with the model.
    """
    _refuse_code(card, directory)
    for name in card.files:
        if name != _REQUIRED and name not in _OPTIONAL:
            raise InvalidInput(f"model_card: unexpected file {name!r}", field="model_card")
    for name, content in card.files.items():
        (directory / name).write_bytes(content)


def _refuse_link_out(path: Path) -> None:
    """Refuses a link to a file elsewhere, which may be secret: the card goes to other services and into exports.

    The Hugging Face hub's cache links `snapshots/<revision>/<file>` to `blobs`, which is accepted.
    """
    directory, target = path.parent.resolve(), path.resolve()
    blobs = directory.parent.parent / "blobs"
    if not target.is_relative_to(directory) and target.parent != blobs:
        raise InvalidInput(
            f"model: {path} is a link to {target}, outside the model's directory; put a copy in its place",
            field="model",
        )


def _refuse_code(card: ModelCard, source: Path) -> None:
    for name in (_REQUIRED, "tokenizer_config.json"):
        try:
            content = json.loads(card.files.get(name, b"{}"))
        except ValueError as error:
            raise InvalidInput(f"model: {source / name} is not JSON: {error}", field="model") from error
        if not isinstance(content, dict):
            raise InvalidInput(f"model: {source / name} is not a JSON object", field="model")
        if "auto_map" in content:
            raise InvalidInput(
                f"model: {source / name} has auto_map, which asks to run Python code that comes with the model. "
                "Lockstep never runs such code: use a model that transformers supports by itself and remove auto_map",
                field="model",
            )
