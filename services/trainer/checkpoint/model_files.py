"""Reads the safetensors files of a Hugging Face model directory. Weights in any other format are never read."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from services.common.errors import InvalidInput
from services.common.families.architecture import read_content, require_counts
from services.common.files.model_card import INDEX, read_weight_map, shard_names
from services.common.files.storage import is_there

# How safetensors names the dtypes of weights. Others are quantized, and their scales would be ignored.
_FLOATS = ("F64", "F32", "F16", "BF16")
# A tensor in old checkpoints; transformers computes it from the config.
_COMPUTED = r"rotary_emb\.inv_freq$"
# Rows of a tensor that are compared at a time.
_ROWS = 4096


@dataclass(frozen=True)
class Stored:
    """Describes a tensor in a file. `dtype` is safetensors' name, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Returns all tensors of a model by name. Reads only the headers of the files.

    Raises:
        InvalidInput: There is no safetensors file (pickled weights, `pytorch_model.bin`, are not read), a file is
            missing or damaged, the index names what is not there, or other programs could read other weights from
            this directory. The message has the file.
    """
    shards = read_weight_map(directory)
    stored: dict[str, Stored] = {}
    for name in shard_names(shards):
        header = _read_header(directory / name)
        for tensor in sorted(stored.keys() & header.keys())[:1]:
            raise InvalidInput(f"model: {tensor} is in two files, {stored[tensor].file} and {name}", field="model")
        stored |= header
    for tensor, shard in shards.items():
        if tensor not in stored or stored[tensor].file != directory / shard:
            raise InvalidInput(f"model: {directory / INDEX}: {tensor} is not in {shard}", field="model")
    return stored


@contextmanager
def opened(file: Path) -> Iterator[safe_open]:
    """Opens a safetensors file and closes it with the block.

    Raises:
        InvalidInput: The file is missing or damaged.
    """
    if not is_there(file, field="model"):
        raise InvalidInput(f"model: {file} does not exist", field="model")
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"model: {file} is not a whole safetensors file: {error}", field="model") from error


def require_tensors(stored: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], directory: Path) -> None:
    """Checks the tensors that a model needs before any of them is read.

    Raises:
        InvalidInput: Tensors are missing, or one has another shape than in `expected` or is not of floating point.
    """
    if missing := [name for name in expected if name not in stored]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise InvalidInput(f"model: {directory} has no tensor {', '.join(missing[:5])}{more}", field="model")
    for name, shape in expected.items():
        found = stored[name]
        if found.shape != tuple(shape):
            shapes = f"has shape {list(found.shape)}, but config.json gives {list(shape)}"
            raise InvalidInput(f"model: {found.file}: {name} {shapes}", field="model")
        if found.dtype not in _FLOATS:
            raise InvalidInput(
                f"model: {found.file}: {name} has dtype {found.dtype}; weights must be {', '.join(_FLOATS)}",
                field="model",
            )


def require_known(stored: Mapping[str, Stored], known: Collection[str], ignored: Iterable[str] = ()) -> None:
    """Checks that no tensor of a checkpoint would be left out of the model, and so out of what engines are sent.

    `ignored` are regular expressions for the tensors that transformers leaves out on purpose.

    Raises:
        InvalidInput: A tensor is not in `known`.
    """
    for name in sorted(stored.keys() - set(known)):
        if not any(re.search(pattern, name) for pattern in (_COMPUTED, *ignored)):
            raise InvalidInput(
                f"model: {name} in its checkpoint is not supported: it is in {stored[name].file}, but not in the model "
                "that config.json describes",
                field="model",
            )


def require_same_if_tied(stored: Mapping[str, Stored], copy: str, original: str) -> None:
    """Checks that two tensors that config.json ties have the same values, if the checkpoint has both.

    transformers would keep both tensors, and vLLM would use one for both, so no other choice is the same model
    everywhere.

    Raises:
        InvalidInput: They differ.
    """
    if copy not in stored or original not in stored:
        return
    one, other = stored[copy], stored[original]
    with opened(one.file) as first, opened(other.file) as second:
        rows_of = first.get_slice(copy), second.get_slice(original)
        starts = range(0, one.shape[0], _ROWS) if one.shape == other.shape and one.shape else ()
        is_same = bool(starts) and all(
            torch.equal(*(rows[start : start + _ROWS] for rows in rows_of)) for start in starts
        )
    if not is_same:
        raise InvalidInput(
            f"model: config.json ties {copy} to {original} (tie_word_embeddings), but {one.file} has a {copy} of other "
            f"values. Set tie_word_embeddings to false to use both, or remove {copy} from the file",
            field="model",
        )


def require_finite(tensors: Iterable[tuple[str, torch.Tensor]], directory: str) -> None:
    """Checks this rank's shards of a model's weights.

    Raises:
        InvalidInput: A number is NaN or infinite.
    """
    # The largest absolute value is NaN or infinite if any value is, and needs no memory.
    named = [(name, torch.linalg.vector_norm(tensor, float("inf"))) for name, tensor in tensors if tensor.numel()]
    if not named:
        return
    are_finite = torch.stack([largest.float() for _, largest in named]).isfinite().tolist()
    for (name, _), is_finite in zip(named, are_finite, strict=True):
        if not is_finite:
            raise InvalidInput(f"model: {directory}: {name} has numbers that are not finite", field="model")


def _read_header(file: Path) -> dict[str, Stored]:
    with opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 it is not a mapping
        return {name: Stored(file, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def load_config(model_path: str) -> PretrainedConfig:
    """Returns transformers' config of a model.

    Raises:
        InvalidInput: transformers does not know the architecture, or a value in config.json is invalid.
    """
    require_counts(read_content(model_path), f"{model_path}/config.json")
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its classes of configs check values by many kinds of errors, and read nothing else
        raise InvalidInput(f"model: {model_path}/config.json: {error!r}", field="model") from error
