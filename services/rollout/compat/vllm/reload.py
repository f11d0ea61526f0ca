"""Reloads a live engine's weights with vLLM's layerwise reload, and completes what that leaves undone.

Reason: vLLM's own weight transfer, which calls the same two functions, has its own transport and changes its interface
in every release. Captured CUDA graphs stay valid either way. Seen with vLLM 0.26.0 (GPU) and 0.32.0 (CPU).
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

# Layers whose weights an engine uses as they were loaded.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
_PLAIN_ATTENTION = ("Attention",)


def reload_weights(model: nn.Module, model_config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads `weights`, by their checkpoint names, as vLLM would from files. The device may still be busy on return."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        _unpack_experts_on_cpu(model)
    assert callable(model.load_weights), "every model of vLLM has this method"
    with _without_adapters(model):
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        finalize_layerwise_reload(model, model_config)
    if on_cpu:
        _repack_tied_head_on_cpu(model)


def abort_reload(model: nn.Module) -> None:
    """Undoes an incomplete reload, whose pieces vLLM would otherwise mix into the next one."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


def not_plain(model: nn.Module) -> str:
    """Returns the name of a layer class that changes its weights after loading; empty if there is none."""
    for module in model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in (*_PLAIN_METHODS, "NoneType", "BaseKVCacheMethod"):
            return method
        is_attention = "Attention" in type(module).__name__ and hasattr(module, "process_weights_after_loading")
        if is_attention and type(module).__name__ not in _PLAIN_ATTENTION:
            return type(module).__name__
    return ""


@contextlib.contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Removes the layers that vLLM wraps for adapters inside the block, because checkpoint names do not match them."""
    wrapped = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in wrapped:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in wrapped:
            setattr(parent, name, layer)


def _unpack_experts_on_cpu(model: nn.Module) -> None:
    """Removes the kernels of vLLM's CPU MoE layers, which pack loaded weights only while they have no kernel."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_head_on_cpu(model: nn.Module) -> None:
    """Repacks the copy of the weights that a tied lm_head keeps on CPU, which the reload does not update."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
