"""The smallest config of a run, and the error of one that is refused."""

from pathlib import Path

import pytest

from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import InvalidInput

SMALLEST = {
    "model": "m",
    "data": {"train": "a.parquet", "prompts_per_step": 4},
    "reward": {"scorers": [{"kind": "exact"}]},
}


def refused(*args: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        load(Config, args)
    return caught.value.message


def write(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text)
    return str(directory / name)
