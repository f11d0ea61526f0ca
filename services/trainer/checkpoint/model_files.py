"""Reads the safetensors files of a Hugging Face model directory. Weights in any other format are never read."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from services.common.errors import InvalidInput
from services.common.families.supported import check_bounds
from services.common.files.model_card import INDEX, Stored, read_weight_map, require_shapes, shard_names
from services.common.files.storage import is_there

# A tensor in old checkpoints; transformers computes it from the config.
_COMPUTED = r"rotary_emb\.inv_freq$"
# Rows of a tensor that are compared at a time.
_ROWS = 4096
_SAMPLED_BYTES = 1 << 20


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Returns all tensors of a model by name. Reads only the headers of the files.

    A directory from which other programs could read other weights is refused.
    """
    shards = read_weight_map(directory)
    stored: dict[str, Stored] = {}
    for name in shard_names(shards):
        file = directory / name
        with opened(file) as tensors:
            slices = {tensor: tensors.get_slice(tensor) for tensor in tensors.keys()}  # noqa: SIM118 it is no mapping
            header = {
                tensor: Stored(file, part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices.items()
            }
        for tensor in sorted(stored.keys() & header.keys())[:1]:
            raise _refusal(f"{tensor} is in two files, {stored[tensor].file} and {name}")
        stored |= header
    for tensor, shard in shards.items():
        if tensor not in stored or stored[tensor].file != directory / shard:
            raise _refusal(f"{directory / INDEX}: {tensor} is not in {shard}")
    return stored


@contextmanager
def opened(file: Path) -> Iterator[safe_open]:
    """Opens a safetensors file and closes it with the block."""
    if not is_there(file):
        raise _refusal(f"{file} does not exist")
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise _refusal(f"{file} is not a whole safetensors file: {error}") from error


def require_tensors(
    stored: Mapping[str, Stored],
    expected: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    directory: Path,
    *,
    has_head: bool,
    ignored: Iterable[str] = (),
) -> None:
    """Checks that a checkpoint has the model's tensors, with the `expected` shapes and of floating point, unread.

    `tied` maps copies to originals: the checkpoint may have both, if they are equal. With `has_head` it may have no
    other tensor, which would be left out of the model, and so out of what engines are sent; except those that
    transformers leaves out on purpose, by the regular expressions in `ignored`.
    """
    require_shapes(stored, expected, directory)
    unknown = sorted(stored.keys() - {*expected, *tied, *tied.values()}) if has_head else []
    for name in unknown:
        if not any(re.search(pattern, name) for pattern in (_COMPUTED, *ignored)):
            raise _refusal(
                f"{name} in its checkpoint is not supported: it is in {stored[name].file}, but not in the model "
                "that config.json describes"
            )
    for copy, original in tied.items():
        if copy in stored and original in stored:
            _require_same(stored, copy, original)


def _require_same(stored: Mapping[str, Stored], copy: str, original: str) -> None:
    """Checks that tensors that config.json ties have the same values.

    transformers would keep both tensors, and vLLM would use one for both, so no other choice is the same model
    everywhere.
    """
    one, other = stored[copy], stored[original]
    with opened(one.file) as first, opened(other.file) as second:
        rows_of = first.get_slice(copy), second.get_slice(original)
        starts = range(0, one.shape[0], _ROWS) if one.shape == other.shape and one.shape else ()
        is_same = bool(starts) and all(
            torch.equal(*(rows[start : start + _ROWS] for rows in rows_of)) for start in starts
        )
    if not is_same:
        raise _refusal(
            f"config.json ties {copy} to {original} (tie_word_embeddings), but {one.file} has a {copy} of other "
            f"values. Set tie_word_embeddings to false to use both, or remove {copy} from the file"
        )


def require_finite(tensors: Iterable[tuple[str, torch.Tensor]], directory: str) -> None:
    """Checks that this rank's shards of a model's weights have no NaN and no infinite number."""
    # The largest absolute value is NaN or infinite if any value is, and needs no memory.
    named = [(name, torch.linalg.vector_norm(tensor, float("inf"))) for name, tensor in tensors if tensor.numel()]
    if not named:
        return
    are_finite = torch.stack([largest.float() for _, largest in named]).isfinite().tolist()
    for (name, _), is_finite in zip(named, are_finite, strict=True):
        if not is_finite:
            raise _refusal(f"{directory}: {name} has numbers that are not finite")


def load_config(model_path: str) -> PretrainedConfig:
    check_bounds(model_path)
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its classes of configs check values by many kinds of errors, and read nothing else
        raise _refusal(f"{model_path}/config.json: {error!r}") from error


def _refusal(problem: str) -> InvalidInput:
    return InvalidInput(f"model: {problem}", field="model")


def sampled_sha256(directory: Path) -> str:
    """Returns a digest of the sizes and the first and last MiB of a model's weight files: fast, and not the same for
    other weights, such as those of a model before and after its training."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            for begin in (0, max(size - _SAMPLED_BYTES, 0)):
                opened.seek(begin)
                digest.update(size.to_bytes(8, "little") + opened.read(_SAMPLED_BYTES))
    return digest.hexdigest()[:12]
