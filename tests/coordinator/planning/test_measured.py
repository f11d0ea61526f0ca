"""Tests estimates of models outside the registry, whose sizes the trainer's code counts."""

from pathlib import Path
from typing import Any

import pytest

from services.common.families.architecture import Architecture
from services.coordinator.planning.activations import MeasuredModel
from services.coordinator.planning.memory import fsdp_memory
from tests.coordinator.planning.small_models import make


def measured(model: Architecture, **changes: Any) -> MeasuredModel:
    """Returns what a probe says of the model (tests/trainer/test_zoo.py asks real ones)."""
    layer = model.whole_layer_parameters(0)
    width = 2 * model.query_size + 2 * model.key_value_size + 2 * model.hidden_size + 3 * model.intermediate_size
    sizes: dict[str, Any] = {
        "num_parameters": model.num_parameters,
        "num_trained": model.num_parameters,
        "layer_sizes": (layer,) * model.num_layers,
        "layer_matrices": layer * model.num_layers,
        "layer_width": width,
        "widest": max(model.intermediate_size, model.query_size),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "key_value_size": model.key_value_size,
        "num_key_value_heads": model.num_key_value_heads,
        "sizes": tuple(model.tensor_sizes()),
        "adapter_sizes": (),
    }
    return MeasuredModel(model.model_type, "packed", "a kernel", **sizes | changes)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_measured_model_takes_what_the_registry_says(dense: Path, is_gpu: bool) -> None:
    config, model = make(dense, strategy="fsdp", num_ranks=2)
    want, got = (fsdp_memory(config, one, is_gpu=is_gpu) for one in (model, measured(model)))
    for part in ("parameters", "weights", "gradients", "optimizer", "gathered", "publication"):
        assert getattr(got, part) == getattr(want, part), part
    assert 0.8 <= got.activations / want.activations <= 1.05
    assert (got.microbatch.forward, got.microbatch.backward) == (want.microbatch.forward, want.microbatch.backward)


def test_a_frozen_tower_and_adapters_have_no_gradients(dense: Path) -> None:
    config, model = make(dense, strategy="fsdp", num_ranks=2, compute_dtype="bfloat16")
    tower = measured(model, num_parameters=model.num_parameters + 1000)
    memory = fsdp_memory(config, tower, is_gpu=True)
    assert memory.weights == 4 * (model.num_parameters + 1000) // 2
    assert (memory.gradients, memory.optimizer) == (4 * model.num_parameters, 8 * model.num_parameters // 2)
    config, _ = make(dense, strategy="fsdp", num_ranks=2, compute_dtype="bfloat16", lora={"rank": 4})
    memory = fsdp_memory(config, measured(model, adapter_sizes=(300, 100)), is_gpu=True)
    assert (memory.weights, memory.gradients) == (2 * model.num_parameters // 2 + 4 * 200, 4 * 400)
    assert memory.optimizer == 8 * 200
