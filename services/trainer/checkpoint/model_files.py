"""Finds the safetensors files of a Hugging Face model directory. Weights in any other format are never read."""

import json
from pathlib import Path

from safetensors import safe_open

from services.common.errors import InvalidInput


def tensor_files(directory: Path) -> dict[str, Path]:
    """Returns the file of each tensor by the tensor's name.

    Raises:
        InvalidInput: There is no safetensors file. Pickled weights, `pytorch_model.bin`, are not read.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    whole = directory / "model.safetensors"
    if not whole.is_file():
        raise InvalidInput(f"model: {directory} has no model.safetensors", field="model")
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), whole)
