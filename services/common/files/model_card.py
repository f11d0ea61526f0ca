"""Reads and writes model cards: the small files of a model, without weights, that an engine and a tokenizer need.

The trainer reads them from its model directory, so rollout and coordinator need neither a copy of the model nor access
to the Hugging Face hub.
"""

from pathlib import Path

from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput, NotFound
from services.common.files.regular_files import is_there, parse_object, read_regular

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
# Files whose key `auto_map` makes transformers import Python code.
_NAMES_CODE = (_REQUIRED, "tokenizer_config.json")


def read_model_card(model_path: str | Path) -> ModelCard:
    """Returns the card of a model directory.

    Raises:
        NotFound: The directory does not exist or has no config.json.
        InvalidInput: A file is not a regular file, links to a file outside the model, is not a JSON object though its
            name ends in .json, is not text, or asks to run code that comes with the model (`auto_map`), which is never
            run.
    """
    directory = Path(model_path)
    if not directory.is_dir():
        raise NotFound(f"model: directory {directory} does not exist", field="model")
    names = [name for name in (_REQUIRED, *_OPTIONAL) if is_there(directory / name, field="model")]
    if _REQUIRED not in names:
        raise NotFound(f"model: {directory} has no {_REQUIRED}", field="model")
    for name in names:
        _refuse_outside(directory / name)
    card = ModelCard(files={name: read_regular(directory / name, field="model") for name in names})
    _refuse_code(card, directory)
    return card


def card_texts(card: ModelCard, directory: Path = Path("model_card")) -> dict[str, str]:
    """Returns the texts of a card's files by name. `directory` is where they are to be written.

    Raises:
        InvalidInput: The card has an unexpected file, or asks to run code that comes with the model.
    """
    for name in card.files:
        if name != _REQUIRED and name not in _OPTIONAL:
            raise InvalidInput(f"model_card: unexpected file {name!r}", field="model_card")
    _refuse_code(card, directory)
    return {name: content.decode() for name, content in card.files.items()}


def write_model_card(card: ModelCard, directory: Path) -> None:
    """Writes the card's files into `directory`.

    Raises:
        InvalidInput: See `card_texts`.
    """
    card_texts(card, directory)
    for name, content in card.files.items():
        (directory / name).write_bytes(content)


def _refuse_outside(file: Path) -> None:
    """Refuses a link to a file outside the model, because the content of the card's files leaves this host.

    A snapshot in the cache of the Hugging Face hub links to files of its repository, `../../blobs/<hash>`.
    """
    directory = file.parent.resolve()
    blobs = [directory.parents[1] / "blobs"] if directory.parent.name == "snapshots" else []
    target = file.resolve()
    if not any(target.is_relative_to(root) for root in (directory, *blobs)):
        raise InvalidInput(f"model: {file} links to {target}, outside the model; replace it by a copy", field="model")


def _refuse_code(card: ModelCard, source: Path) -> None:
    for name, content in card.files.items():
        if not name.endswith(".json"):
            _require_text(content, source / name)
        elif "auto_map" in parse_object(content, source / name, field="model") and name in _NAMES_CODE:
            raise InvalidInput(
                f"model: {source / name} has auto_map, which asks to run Python code that comes with the model. "
                "Lockstep never runs such code: use a model that transformers supports by itself and remove auto_map",
                field="model",
            )


def _require_text(content: bytes, file: Path) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"model: {file} is not UTF-8 text: {error}", field="model") from error
