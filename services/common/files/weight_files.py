"""Finds the safetensors files of a model and checks that they are whole, from their headers and without torch."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from services.common.errors import InvalidInput
from services.common.files.regular_files import is_there, parse_object, read_regular

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTER = "adapter_config.json"
# A file begins with the length of its header, which is JSON; the format's readers refuse a longer one.
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000


def read_weight_map(directory: Path) -> dict[str, str]:
    """Returns the file of each tensor that the index names; empty if all weights are in model.safetensors.

    Raises:
        InvalidInput: There is no safetensors file (pickled weights, `pytorch_model.bin`, are not read), the index names
            no file of the directory, or other programs could read other weights from it.
    """
    has_index, has_whole = (is_there(directory / name, field="model") for name in (INDEX, WHOLE))
    if not has_index and not has_whole:
        raise InvalidInput(f"model: {directory} has no {WHOLE}", field="model")
    shards = _read_index(directory / INDEX) if has_index else {}
    if has_whole and set(shards.values()) - {WHOLE}:
        raise InvalidInput(  # transformers reads the one, programs that know only the index the others
            f"model: {directory} has both {WHOLE} and {INDEX}, which names other files; remove one of them",
            field="model",
        )
    if is_there(directory / _ADAPTER, field="model"):
        raise InvalidInput(  # where PEFT is installed, transformers adds the adapter to the weights
            f"model: {directory} has {_ADAPTER}: merge the adapter into the weights, or remove it", field="model"
        )
    return shards


def shard_names(weight_map: Mapping[str, str]) -> list[str]:
    """Returns the names of the files that hold the weights; `weight_map` is the result of `read_weight_map`."""
    return sorted(set(weight_map.values())) or [WHOLE]


def require_whole_weights(directory: Path) -> None:
    """Checks that all files of a model's weights are there, and as long as their headers say.

    Raises:
        InvalidInput: One is missing or damaged, or see `read_weight_map`. The message has the file.
    """
    for name in shard_names(read_weight_map(directory)):
        file = directory / name
        if not is_there(file, field="model"):
            raise InvalidInput(f"model: {file} does not exist", field="model")
        if problem := _problem(file):
            raise InvalidInput(f"model: {file} is not a whole safetensors file: {problem}", field="model")


def _problem(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            size = os.fstat(opened.fileno()).st_size
            if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
                return "its header is cut off" if size else "it is empty"
            header = parse_object(opened.read(length), file, field="model")
        tensors = [cast(dict[str, Any], tensor) for name, tensor in header.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (InvalidInput, OSError, ValueError, TypeError, LookupError):
        return "its header cannot be read"
    return "" if size == expected else f"it has {size} bytes, and its header describes {expected}"


def _read_index(index: Path) -> dict[str, str]:
    shards = parse_object(read_regular(index, field="model"), index, field="model").get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InvalidInput(f"model: {index} has no weight_map", field="model")
    for name in cast(dict[str, object], shards).values():
        if not isinstance(name, str) or name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise InvalidInput(f"model: {index} names {name!r}, which is not a file in its directory", field="model")
    return cast(dict[str, str], shards)
