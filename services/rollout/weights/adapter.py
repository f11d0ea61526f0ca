"""Loads a received adapter into vLLM, which reads adapters from directories only."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest


def adapter_request(path: str, *, load_inplace: bool = False) -> LoRARequest:
    """Returns vLLM's request for the policy's only adapter. `path` matters only for loading it."""
    return LoRARequest("policy", 1, path, load_inplace=load_inplace)


def load_adapter(
    add_lora: Callable[[LoRARequest], bool], config_json: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Replaces the adapter with `tensors`, by their PEFT names, through the worker's `add_lora`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-adapter-") as directory:
        save_file(dict(tensors), Path(directory) / "adapter_model.safetensors")
        (Path(directory) / "adapter_config.json").write_text(config_json)
        add_lora(adapter_request(directory, load_inplace=True))
