"""Reads a run's data before any service starts, or after the trainer has sent the model card."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lockstep.types.v1.types_pb2 import ModelCard

from services.common.config.reading.load import AnyConfig
from services.common.files.model_card import read_model_card, write_model_card
from services.coordinator.text.tokenizer import Tokenizer

Data = TypeVar("Data")
ConfigT = TypeVar("ConfigT", bound=AnyConfig)
Load = Callable[[ConfigT, Tokenizer], Data]
"""Reads the data that a config names, with the tokenizer of its model."""


def load_early(config: ConfigT, load: Load[ConfigT, Data], *, model_is_remote: bool) -> Data | None:
    """Returns the run's data; None if only the trainer's host has the model.

    Raises:
        LockstepError: The model's directory cannot be used, or `load` raised it.
    """
    if model_is_remote and not Path(config.model).is_dir():
        return None
    read_model_card(config.model)
    return _load(config, Path(config.model), load)


def load_late(config: ConfigT, card: ModelCard, load: Load[ConfigT, Data]) -> Data:
    """Returns the run's data, read with the model card that the trainer sent."""
    directory = config.run_dir / "model_card"
    directory.mkdir(exist_ok=True)
    write_model_card(card, directory)
    return _load(config, directory, load)


def _load(config: ConfigT, model: Path, load: Load[ConfigT, Data]) -> Data:
    return load(config, Tokenizer.load(model, chat_template=config.data.chat_template, date=config.data.template_date))
