"""Writes the policy in formats that other programs read: a Hugging Face model, or a PEFT adapter."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from lockstep.types.v1.types_pb2 import ModelCard
from safetensors import SafetensorError
from safetensors.torch import save_file

from services.common.config.trainer import LoraConfig
from services.common.files.model_card import write_model_card
from services.common.weights.plan import NamedTensors

_SHARD_BYTES = 4 << 30
_PEFT_PREFIX = "base_model.model."
# With either, programs would take the directory of an adapter for a whole model.
_OF_MODELS = ("config.json", "generation_config.json")


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
