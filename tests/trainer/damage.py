"""Changes model directories, for tests of whether a trainer refuses them or computes what transformers computes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

Change = Callable[[Path], Any]
Tensors = dict[str, torch.Tensor]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SHARD = "shard-1.safetensors"
_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def contains(name: str, content: bytes) -> Change:
    return lambda model: (model / name).write_bytes(content)


def lacks(name: str) -> Change:
    return lambda model: (model / name).unlink()


def is_other(name: str, make: Callable[[Path], Any]) -> Change:
    def apply(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        make(model / name)

    return apply


def has_json(name: str = CONFIG, **changes: Any) -> Change:
    """Changes keys of a JSON file; a key without a value (`...`) is removed."""

    def apply(model: Path) -> None:
        content = json.loads((model / name).read_text()) | changes
        (model / name).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return apply


def has_tensors(change: Callable[[Tensors], Any], **metadata: str) -> Change:
    def apply(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        change(tensors)
        save_file(tensors, model / WEIGHTS, metadata=metadata or {"format": "pt"})

    return apply


def truncated(model: Path) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size // 2)


def overlapping(model: Path) -> None:
    """Gives two norms the bytes of one."""
    content = (model / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header["model.layers.0.input_layernorm.weight"]["data_offsets"] = header["model.norm.weight"]["data_offsets"]
    changed = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(len(changed).to_bytes(8, "little") + changed + data)


def indexed(first: str = SHARD, **files: Any) -> Change:
    """Renames the weights to `first` and adds an index that names that file for every tensor, except for `files`.

    `files` maps other tensors to their files; `__` in a tensor's name stands for a dot.
    """

    def apply(model: Path) -> None:
        (model / WEIGHTS).rename(model / first)
        others = {key.replace("__", "."): file for key, file in files.items()}
        weight_map = dict.fromkeys(load_file(model / first), first) | others
        (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


def copied(name: str, source: str = WEIGHTS) -> Change:
    return lambda model: shutil.copy(model / source, model / name)


def all_of(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes]


def link_outside(path: Path) -> None:
    (path.parents[1] / "secret.json").write_text("{}")
    path.symlink_to("../secret.json")


def is_a(model_type: str, **config: Any) -> Change:
    """Writes another model, of random weights.

    `config` overrides a tiny shape; a key without a value (`...`) is left out of it.
    """

    def apply(model: Path) -> None:
        torch.manual_seed(0)
        shape = {key: value for key, value in (_SHAPE | config).items() if value is not ...}
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim == 1:  # a norm or a bias of only 1 or 0 would hide a mistake in its place
                    parameter += 0.2 * torch.randn(parameter.shape)
        made.save_pretrained(model)

    return apply
