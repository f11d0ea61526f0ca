"""Reads the safetensors files of a Hugging Face model directory; weights in any other format are never read.

It also writes the policy in formats that other programs read: a Hugging Face model, or a PEFT adapter.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from lockstep.types.v1.types_pb2 import ModelCard
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from services.common.config.trainer import LoraConfig
from services.common.errors import InvalidInput
from services.common.families.supported import check_bounds
from services.common.files import is_there
from services.common.model_card import Stored, require_shapes, write_model_card
from services.common.weights.plan import NamedTensors

# A tensor in old checkpoints; transformers computes it from the config.
_COMPUTED = r"rotary_emb\.inv_freq$"
# Rows of a tensor that are compared at a time.
_ROWS = 4096
_SAMPLED_BYTES = 1 << 20
# Of files that are written.
_SHARD_BYTES = 4 << 30
_PEFT_PREFIX = "base_model.model."
# With either, programs would take the directory of an adapter for a whole model.
_OF_MODELS = ("config.json", "generation_config.json")


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


def served_card(card: ModelCard, files: Mapping[str, str]) -> ModelCard:
    return ModelCard(files={**card.files, **{name: text.encode() for name, text in files.items()}})


def tokenizer_card(card: ModelCard) -> ModelCard:
    """Returns the files of `card` that belong beside an adapter: those of its tokenizer and chat template."""
    return ModelCard(files={name: content for name, content in card.files.items() if name not in _OF_MODELS})


def export_hugging_face(weights: NamedTensors, card: ModelCard, directory: Path) -> int:
    """Writes the model into `directory`, which must exist and be empty; returns the bytes of the weights.

    config.json gets the dtype that most of the weights have here, which may be another than they were loaded in.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    where: dict[str, int] = {}
    of_dtype: Counter[torch.dtype] = Counter()
    filled = 0
    for name, tensor in weights:
        if filled and filled + tensor.nbytes > _SHARD_BYTES:
            _write(directory, shards[-1], len(shards))
            shards[-1] = {}  # the file is written; this frees its tensors
            shards.append({})
            filled = 0
        # The tensor may be a view that is valid only until the next iteration.
        shards[-1][name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        where[name] = len(shards)
        filled += tensor.nbytes
        of_dtype[tensor.dtype] += tensor.nbytes
    _write(directory, shards[-1], len(shards))
    index = {
        "metadata": {"total_size": of_dtype.total()},
        "weight_map": {name: _shard_name(number) for name, number in where.items()},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    write_model_card(_with_dtype(card, of_dtype.most_common(1)[0][0]), directory)
    return of_dtype.total()


def export_adapter(adapter: NamedTensors, lora: LoraConfig, base_path: str, directory: Path) -> int:
    """Creates `directory` with a policy's adapters, for PEFT and vLLM; returns the bytes of their weights."""
    # The adapters of a fused layer share one A; clone it for each, since safetensors stores no shared memory.
    tensors = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in adapter}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = adapter_config(lora, base_path, list(tensors))
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return sum(tensor.nbytes for tensor in tensors.values())


def adapter_config(lora: LoraConfig, base_path: str, names: Sequence[str]) -> dict[str, object]:
    """Returns the content of PEFT's adapter_config.json for adapter tensors of these names."""
    modules = dict.fromkeys(name.split(".lora_")[0].removeprefix(_PEFT_PREFIX) for name in names)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "target_modules": list(modules),
    }


def _with_dtype(card: ModelCard, dtype: torch.dtype) -> ModelCard:
    """Returns the card with this dtype in config.json. Older models name it torch_dtype, which old programs read."""
    config = json.loads(card.files["config.json"])
    named = str(dtype).removeprefix("torch.")
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, dict)]
    places = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if key in part]
    for part, key in places or [(config, "dtype")]:
        part[key] = named
    content = json.dumps(config, indent=2, ensure_ascii=False).encode()
    return ModelCard(files={**card.files, "config.json": content})


def _write(directory: Path, shard: dict[str, torch.Tensor], number: int) -> None:
    path = directory / _shard_name(number)
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:  # has the number of a system error only in its text
        if match := re.search(r"os error (\d+)", str(error)):
            code = int(match[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"
