"""The policy as a Hugging Face model directory: safetensors shards, index, and the files of the model card."""

import json
from pathlib import Path

import torch
from lockstep.types.v1.types_pb2 import ModelCard
from safetensors.torch import save_file

from services.common.model_card import write_model_card
from services.common.weights.plan import NamedTensors

_SHARD_BYTES = 4 << 30


def export_hugging_face(weights: NamedTensors, card: ModelCard, directory: Path) -> int:
    """Writes into `directory`, which exists and is empty; returns the bytes of the weights."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    where: dict[str, int] = {}
    filled = total = 0
    for name, tensor in weights:
        if filled and filled + tensor.nbytes > _SHARD_BYTES:
            _write(directory, shards[-1], len(shards))
            shards[-1] = {}
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.cpu().contiguous()
        where[name] = len(shards)
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
    _write(directory, shards[-1], len(shards))
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: _shard_name(number) for name, number in where.items()},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    write_model_card(card, directory)
    return total


def _write(directory: Path, shard: dict[str, torch.Tensor], number: int) -> None:
    save_file(shard, directory / _shard_name(number), metadata={"format": "pt"})


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"
