"""Checks models as the trainer does when it opens them, without their weights, in a process of its own.

`python -m services.trainer.probe model` works as services.common.probe says.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from services.common.config.trainer import TrainerConfig
from services.common.probe import Answers, Requests, answer_with
from services.trainer.backend import compute_dtype

# How many experts compute a token, as families call it.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")


async def model(requests: Requests) -> Answers:
    """Refuses what a trainer on this host would. A request has `model`, a directory, and `config`, a TrainerConfig.

    The answer has the sizes of a model with strategy fsdp: services.coordinator.planning.activations.MeasuredModel.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    async for request in requests:
        config = TrainerConfig.model_validate_json(request["config"])
        if config.strategy == "megatron":
            from services.trainer.adapters import adapter_sites
            from services.trainer.megatron.settings import model_architecture, read_config

            architecture = model_architecture(read_config(request["model"]))
            if config.lora.rank:
                adapter_sites(architecture, config.lora)
            if config.megatron.use_mbridge:
                from services.trainer.megatron.mbridge import prove_alone

                prove_alone(request["model"], config)
            yield {}
        else:
            yield _sizes(request["model"], config, device)


def _sizes(directory: str, config: TrainerConfig, device: torch.device) -> dict[str, object]:
    from services.trainer.checkpoint.model_files import load_config
    from services.trainer.fsdp.loading import layout_of, make_empty
    from services.trainer.fsdp.lora import AdapterStream, add_adapters, sites_of
    from services.trainer.fsdp.model import LogprobModel, WeightStream

    dtype = compute_dtype(config, device)
    empty = make_empty(directory, compute_dtype=dtype, weight_dtype=dtype)
    layout = layout_of(load_config(directory))
    sites = sites_of(empty, config.lora)
    text, whole = empty.config.get_text_config(), LogprobModel(empty, layout)
    stream = WeightStream(empty, dtype, torch.device("cpu"))
    hidden, parameters = whole.head.get_parameter("weight").shape[1], list(empty.parameters())
    layer_configs = getattr(text, "per_layer_config", None) or [text]  # in Gemma 4, layers have keys of several sizes
    largest = max(layer_configs, key=lambda layer: _key_value_size(layer, hidden))
    widths = [list(_widths(layer, hidden, text)) for layer in whole.layers]
    matrices = (one for layer in whole.layers for one in layer.parameters() if one.ndim == 2 and one.requires_grad)
    sizes: dict[str, object] = {
        "model_type": empty.config.model_type,
        "layout": layout.value,
        "attention": whole.attention(device, dtype),
        "num_parameters": sum(one.numel() for one in parameters),
        "num_trained": sum(one.numel() for one in parameters if one.requires_grad),
        "layer_sizes": [sum(one.numel() for one in layer.parameters()) for layer in whole.layers],
        "layer_matrices": sum(one.numel() for one in matrices),
        "layer_width": sum(map(sum, widths)) // len(widths),
        "widest": max((width for layer in widths for width in layer), default=hidden),
        "hidden_size": hidden,
        "vocab_size": whole.head.get_parameter("weight").shape[0],
        "key_value_size": _key_value_size(largest, hidden),
        "num_key_value_heads": _key_value_heads(largest),
        "sizes": [spec.numel() for _, spec in stream.specs()],
    }
    add_adapters(empty, config.lora, sites, seed=0)
    return sizes | {"adapter_sizes": [spec.numel() for _, spec in AdapterStream(empty, stream).specs()]}


def _key_value_size(layer: Any, hidden: int) -> int:
    """Returns how many numbers the keys of a token have; `layer` is the config of a layer, or of all."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    head_dim = getattr(layer, "head_dim", None) or hidden // heads
    return head_dim * _key_value_heads(layer)


def _key_value_heads(layer: Any) -> int:
    return getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", None) or 1


def _widths(layer: nn.Module, hidden: int, text: Any) -> Iterator[int]:
    """Yields how many numbers each matrix reads and writes for one token, without hidden states that it reads."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            yield module.out_features
            yield module.in_features if module.in_features != hidden else 0
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):  # a matrix for each expert
                num_experts, *sides = parameter.shape
                top_k = next((getattr(text, key) for key in _TOP_K if getattr(text, key, None)), num_experts)
                yield from (top_k * side for side in sides)  # each expert has a copy of the token


if __name__ == "__main__":
    answer_with({"model": model})
