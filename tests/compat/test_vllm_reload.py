"""Tests vLLM's layerwise reload of weights as the rollout service uses it, on a model of one layer."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA, ColumnParallelLinearWithLoRA
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
    record_metadata_for_reloading,
)

from services.rollout.compat import worker


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


class Model(nn.Module):
    """Has one layer of two tensors, as vLLM would load it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        for name in ("weight", "bias"):
            self.layer.register_parameter(name, nn.Parameter(torch.zeros(2), requires_grad=False))
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            parameter = self.layer.get_parameter(name)
            getattr(parameter, "weight_loader", lambda param, loaded: param.data.copy_(loaded))(parameter, tensor)


def test_the_reloads_functions_are_called_as_vllm_defines_them() -> None:
    assert names(initialize_layerwise_reload) == ["model"]
    assert names(layerwise.finalize_layerwise_processing) == ["model", "model_config"]
    assert names(layerwise._place_kernel_tensors) == ["layer", "info"]
    info = layerwise.get_layerwise_info(Model().layer)
    assert info.kernel_tensors is None and not info.can_load()
    info.reset()


def half_loaded() -> tuple[Model, torch.Tensor]:
    """Returns a model into which one of two tensors was loaded, and the memory that the engine reads."""
    model = Model()
    live = model.layer.weight.data
    initialize_layerwise_reload(model)
    model.load_weights([("weight", torch.ones(2))])
    return model, live


def test_a_reload_that_broke_off_would_mix_with_the_next() -> None:
    model, _ = half_loaded()
    assert model.layer.weight.is_meta  # the engine has no weights in between
    initialize_layerwise_reload(model)
    model.load_weights([("bias", torch.full((2,), 3.0))])
    finalize_layerwise_reload(model, None)
    assert model.layer.weight.tolist() == [1, 1]  # of the publication before


def test_a_reload_that_is_undone_does_not() -> None:
    model, live = half_loaded()
    worker.abort_reload(model)
    assert model.layer.weight.data_ptr() == live.data_ptr() and model.layer.weight.tolist() == [0, 0]
    worker.reload_weights(model, None, [("weight", torch.full((2,), 2.0)), ("bias", torch.full((2,), 3.0))])
    assert model.layer.weight.data_ptr() == live.data_ptr() and live.tolist() == [2, 2]


def test_a_reload_reads_the_names_of_weight_loaders() -> None:
    """Partial functions have none. If no error is raised, drop the names in `_prepare_loaders`."""

    def doubled(param: nn.Parameter, loaded: torch.Tensor, factor: int) -> None:
        param.data.copy_(factor * loaded)

    models = [Model(), Model()]
    for model in models:
        for parameter in model.parameters():
            vars(parameter)["weight_loader"] = functools.partial(doubled, factor=2)
        record_metadata_for_reloading(model)
    with pytest.raises(AttributeError, match="__name__"):
        initialize_layerwise_reload(models[0])
    worker.reload_weights(models[1], None, [("weight", torch.ones(2)), ("bias", torch.ones(2))])
    assert models[1].layer.weight.tolist() == [2, 2]


@pytest.mark.parametrize("is_redirected", [False, True])
def test_a_reload_loses_copies_past_the_weight_loaders(is_redirected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing is lost any more, drop `_DirectCopies`."""

    class GptOssForCausalLM(Model):
        def load_weights(self, weights: Any) -> None:
            self.layer.weight.copy_(dict(weights)["weight"])

    copied = {"GptOssForCausalLM": ("weight",)} if is_redirected else {}
    monkeypatch.setattr(worker, "_COPIED_DIRECTLY", copied)
    model = GptOssForCausalLM()
    live = model.layer.weight.data
    for value in (2.0, 3.0):
        with torch.no_grad():
            worker.reload_weights(model, None, [("weight", torch.full((2,), value))])
        assert live.tolist() == [value if is_redirected else 0.0] * 2
        assert model.layer.weight.data_ptr() == live.data_ptr()


def test_plain_layers_have_the_names_that_are_looked_for() -> None:
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    assert tuple(method.__name__ for method in methods) == worker._PLAIN_METHODS
    assert (Attention.__name__,) == worker._PLAIN_ATTENTION
    assert callable(Attention.process_weights_after_loading)


def test_layers_with_adapters_keep_their_base_layer() -> None:
    assert issubclass(ColumnParallelLinearWithLoRA, BaseLayerWithLoRA)
    assert "self.base_layer" in inspect.getsource(ColumnParallelLinearWithLoRA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA builds of vLLM do not pack experts for the CPU")
def test_on_cpu_experts_are_packed_only_before_they_have_a_kernel() -> None:
    source = inspect.getsource(UnquantizedFusedMoEMethod)
    packing = source.split("if not is_weight_update:", 1)[1].split("\n    def ", 1)[0]
    assert "is_weight_update = self.moe_kernel is not None" in source
    assert "fused_experts.process_weights_after_loading(" in packing


def test_on_cpu_a_layer_keeps_a_packed_copy_of_its_weight() -> None:
    assert "layer.cpu_linear = " in inspect.getsource(layer_utils.dispatch_cpu_unquantized_gemm)
