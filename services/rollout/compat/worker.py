"""What a worker extension needs of the vLLM Worker that it is mixed into: its attributes, memory, and live weights.

Reason: vLLM documents how to add an extension (worker_extension_cls), but not which attributes the worker has. Seen
with vLLM 0.26.0 and 0.32.0, on GPU and CPU, with one worker in the engine's process and with a process per worker.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload import meta as reload_meta
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from services.common.compat.torch import OperatorWatch, OpOverload

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""The parts of an engine that sleep mode frees, as vLLM calls them."""

# Layers whose weights an engine uses as they were loaded.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
_PLAIN_ATTENTION = ("Attention",)
# Tensors of a layer that its checkpoint does not have: where experts are.
_NEVER_LOADED: set[str] = vars(reload_meta).get("SKIP_LOAD_TENSORS") or reload_meta.SKIP_TENSORS
# The method that gives each row of a weight its own scale.
_BY_ROW = "Fp8PtpcOnlineLinearMethod"
WEIGHT, SCALE = "weight", "weight_scale"
"""What such layers call their weight and its scales, [N, 1]. For kernels the weight is transposed."""
Rows = tuple[torch.Tensor, torch.Tensor]
"""Quantized rows [N, K] and their scales [N, 1]."""


class RowQuantizer(Protocol):
    """Quantizes rows [N, K], to new memory unless some is given, which must be dense."""

    def __call__(self, rows: torch.Tensor, target: Rows | None = None, /) -> Rows: ...


# Parameters that a model's `load_weights` copies to without their weight loader.
_COPIED_DIRECTLY = {"GptOssForCausalLM": ("w13_weight", "w13_bias", "w2_weight", "w2_bias", "sinks")}


class ModelRunner(Protocol):
    """The object that runs the model in a worker."""

    kv_cache_config: KVCacheConfig

    def get_model(self) -> nn.Module: ...


class WorkerExtension:
    """Attributes of the worker, which has them already. This class sets none, because vLLM refuses duplicates."""

    rank: int
    device: torch.device
    model_config: ModelConfig
    vllm_config: VllmConfig
    model_runner: ModelRunner
    add_lora: Callable[[LoRARequest], bool]


def model_of(worker: WorkerExtension) -> nn.Module:
    return worker.model_runner.get_model()


def rank_of(worker: WorkerExtension) -> int:
    """Returns the worker's rank among all workers of a replica, over all data-parallel ranks."""
    parallel = worker.vllm_config.parallel_config
    return getattr(parallel, "data_parallel_index", 0) * parallel.world_size + worker.rank


@contextlib.contextmanager
def weight_loading(worker: WorkerExtension) -> Iterator[None]:
    """Sets the context in which vLLM loads weights: no gradients, the worker's device and its config."""
    with torch.no_grad(), torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        yield


def asleep_bytes(asleep: Collection[str]) -> int:
    """Returns the bytes that vLLM's sleep mode has given back to the GPU while the parts `asleep` sleep.

    Reason: vLLM logs it only, and torch still counts memory that sleep mode has unmapped as reserved. Seen with vLLM
    0.26.0 (CUDA); `is_asleep` came later. vLLM has no sleep mode on CPU.
    """
    return sum(data.handle[1] for data in _allocations(asleep))


def wake_bytes(part: str, asleep: Collection[str]) -> int:
    """Returns the bytes that waking `part` maps: its own, and those of no part, such as CUDA graphs."""
    parts = {part} | ({data.tag for data in _allocations(asleep)} - {WEIGHTS, KV_CACHE})
    return sum(data.handle[1] for data in _allocations(asleep) if data.tag in parts)


def _allocations(asleep: Collection[str]) -> Iterator[Any]:
    if not asleep:
        return
    from vllm.device_allocator.cumem import CuMemAllocator  # only with CUDA

    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if getattr(data, "is_asleep", data.tag in asleep):
            yield data


def keep_plain_tensors(model: nn.Module) -> None:
    """Lets the coming sleep keep the memory of `plain_tensors`, which vLLM then restores when the weights are woken.

    Reason: level 2 of vLLM's sleep mode restores buffers, and a publication brings parameters. Whatever else a module
    has, such as the slopes of ALiBi, would have unspecified content. Seen with vLLM 0.26.0 and 0.32.0 (CUDA).
    """
    from vllm.device_allocator.cumem import CuMemAllocator, libcudart  # only with CUDA

    kept = {tensor.untyped_storage().data_ptr() for tensor in plain_tensors(model)}
    for pointer, data in CuMemAllocator.get_instance().pointer_to_data.items():
        num_bytes = data.handle[1]
        if data.tag == WEIGHTS and any(pointer <= address < pointer + num_bytes for address in kept):
            data.cpu_backup_tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            libcudart.cudaMemcpy(data.cpu_backup_tensor.data_ptr(), pointer, num_bytes)


def plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Returns the tensors of the modules, and of the kernels' objects they have, that share no memory with a parameter
    or buffer."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    values = [value for module in model.modules() for value in vars(module).values()]
    objects = [value for value in values if type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__")]
    values += [value for each in objects if not isinstance(each, nn.Module) for value in vars(each).values()]
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.numel() and tensor.untyped_storage().data_ptr() not in owned]


def reload_weights(model: nn.Module, model_config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads `weights`, by their checkpoint names, as vLLM would from files. The device may still be busy on return.

    It uses vLLM's layerwise reload, and completes what that leaves undone.

    Reason: vLLM's own weight transfer, which calls the same two functions, has its own transport and changes its
    interface in every release. Captured CUDA graphs stay valid either way. Seen with vLLM 0.26.0 (GPU) and 0.32.0
    (CPU).
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        _unpack_experts_on_cpu(model)
    assert callable(model.load_weights), "every model of vLLM has this method"
    with _without_adapters(model):
        copied = _COPIED_DIRECTLY.get(type(model).__name__, ())
        _prepare_loaders(model, copied)
        initialize_layerwise_reload(model)
        with _DirectCopies(model, copied) if copied else contextlib.nullcontext():
            model.load_weights(weights)
        _expect_only_what_comes(model)
        finalize_layerwise_reload(model, model_config)
    if on_cpu:
        _repack_tied_head_on_cpu(model)


def _prepare_loaders(model: nn.Module, copied: Collection[str]) -> None:
    """Gives weight loaders that are functools.partial the names of their functions, and parameters with the names
    `copied` a loader that takes a whole tensor (see `_DirectCopies`).

    Reason: vLLM's layerwise reload reads the name of each loader, which such objects lack. Seen with MiniMax-M2's norms
    of queries and keys in vLLM 0.32.0 (CPU).
    """
    for layer in model.modules():
        parameters, _ = layerwise.get_layerwise_info(layer).restore_metadata
        for tensor in (*parameters.values(), *layer.parameters(recurse=False)):
            loader = getattr(tensor, "weight_loader", None)
            if isinstance(loader, functools.partial):
                vars(loader).setdefault("__name__", loader.func.__name__)
        for name in parameters.keys() & copied:
            vars(parameters[name])["weight_loader"] = default_weight_loader


class _DirectCopies(OperatorWatch):
    """Gives what `load_weights` copies to parameters with these names to their weight loaders.

    Reason: during a layerwise reload parameters are on the meta device, where a copy is lost, and their weight loaders
    keep what they get until a layer is complete. vLLM then warns and goes on with the old weights. Seen with the
    unquantized experts and the sinks of gpt-oss in vLLM 0.26.0 (GPU) and 0.32.0 (CPU).
    """

    def __init__(self, model: nn.Module, names: Collection[str]):
        super().__init__()
        named = (tensor for name, tensor in model.named_parameters() if name.rpartition(".")[2] in names)
        self._targets: dict[int, Any] = {_storage(tensor): tensor for tensor in named}

    def see(self, func: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        target = self._targets.get(_storage(inputs[0])) if func is torch.ops.aten.copy_.default else None
        if target is not None:
            target.weight_loader(target, inputs[1])


def _storage(tensor: torch.Tensor) -> int:
    """Identifies a storage, also on the meta device, where all have the address 0."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def abort_reload(model: nn.Module) -> None:
    """Undoes an incomplete reload, whose pieces vLLM would otherwise mix into the next one."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


def not_plain(model: nn.Module) -> str:
    """Returns the name of a layer class that changes its weights after loading, other than by quantizing them; empty if
    there is none."""
    for module in model.modules():
        if is_quantized(module):  # see `begin_quantizing`
            continue
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in (*_PLAIN_METHODS, "NoneType", "BaseKVCacheMethod"):
            return method
        is_attention = "Attention" in type(module).__name__ and hasattr(module, "process_weights_after_loading")
        if is_attention and type(module).__name__ not in _PLAIN_ATTENTION:
            return type(module).__name__
    return ""


def is_quantized(layer: nn.Module) -> bool:
    """Returns whether vLLM quantizes the layer's weights after it has loaded them (online quantization).

    Seen with vLLM 0.26.0 (GPU) and 0.32.0.
    """
    return bool(getattr(getattr(layer, "quant_method", None), "uses_meta_device", False))


@contextlib.contextmanager
def before_quantizing(model: nn.Module, call: Callable[[nn.Module], object]) -> Iterator[None]:
    """Calls `call` inside the block with each layer whose loaded weights are about to be quantized."""
    methods = [layer.quant_method for layer in model.modules() if is_quantized(layer)]
    for method in methods:
        vars(method)["process_weights_after_loading"] = functools.partial(_call_and_process, call, method)
    try:
        yield
    finally:
        for method in methods:
            del vars(method)["process_weights_after_loading"]


def _call_and_process(call: Callable[[nn.Module], object], method: Any, layer: nn.Module) -> None:
    call(layer)
    type(method).process_weights_after_loading(method, layer)


def loaded_tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Returns those of the layer's parameters and buffers that are loaded, by name."""
    tensors = layerwise.get_layer_tensors(layer)
    return {name: tensor for name, tensor in tensors.items() if name not in _NEVER_LOADED}


def begin_quantizing(layer: nn.Module) -> None:
    """Gives a quantized layer parameters as its checkpoint has them, with unspecified content.

    Reason: a layerwise reload of the whole model spends its time on finding out which bytes go where. These are its
    steps for a single layer, without that. What the kernels read keeps its address, for captured CUDA graphs.
    """
    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)  # pyright: ignore[reportPrivateUsage]
    layerwise.restore_layer_on_meta(layer, info)
    info.load_numel_total = layerwise.get_layer_size(layer)  # for abort_reload
    layerwise.materialize_layer(layer, info)


def row_quantizer(layer: nn.Module) -> RowQuantizer | None:
    """Returns what quantizes rows of the layer's weight; None if vLLM does not quantize it row by row.

    Rows that a tensor-parallel rank has only a part of are excluded: newer versions take their scale over all ranks.
    """
    is_by_row = type(getattr(layer, "quant_method", None)).__name__ == _BY_ROW
    has_whole_rows = getattr(layer, "input_size", None) == getattr(layer, "input_size_per_partition", None)
    return _quantize_rows if is_by_row and has_whole_rows else None


def _quantize_rows(rows: torch.Tensor, target: Rows | None = None, /) -> Rows:
    if target is None:
        scale = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        target = torch.empty_like(rows, dtype=current_platform.fp8_dtype()), scale
    # What `scaled_fp8_quant` calls, which would allocate the scales.
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(target[0], rows, target[1], None)  # pyright: ignore[reportPrivateUsage]
    return target


def finish_quantizing(layer: nn.Module) -> None:
    """Quantizes the content of those parameters to what the kernels read."""
    layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))


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


def _expect_only_what_comes(model: nn.Module) -> None:
    """Keeps vLLM from warning at every reload of layers for which no checkpoint has weights.

    Reason: the layerwise reload counts buffers, such as those of a rotary embedding, and the head that shares the
    embedding's weight among what must come. Seen with vLLM 0.32.0 (CPU).
    """
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or info.load_numel:
            continue
        parameters, _ = info.restore_metadata
        if not parameters or (is_tied and isinstance(layer, ParallelLMHead)):
            info.load_numel_total = 0


def _repack_tied_head_on_cpu(model: nn.Module) -> None:
    """Repacks the copy of the weights that a tied lm_head keeps on CPU, which the reload does not update."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
