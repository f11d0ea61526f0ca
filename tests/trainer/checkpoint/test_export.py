"""Tests that an exported model's files describe the weights in it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep.types.v1.types_pb2 import ModelCard
from safetensors.torch import load_file

from services.trainer.checkpoint.model_files import export_hugging_face


@pytest.mark.parametrize(
    ("config", "written"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, {"dtype": "float32", "torch_dtype": "float32"}),
        ({}, {"dtype": "float32"}),
        ({"text_config": {"dtype": "bfloat16"}}, {"text_config": {"dtype": "float32"}}),
        (
            {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}},
            {"dtype": "float32", "text_config": {"torch_dtype": "float32"}},
        ),
        ({"text_config": {}}, {"dtype": "float32", "text_config": {}}),
    ],
)
def test_config_has_the_dtype_of_the_weights(tmp_path: Path, config: dict[str, Any], written: dict[str, Any]) -> None:
    card = ModelCard(files={"config.json": json.dumps({"model_type": "qwen3", "é": 1} | config).encode()})
    before = card.SerializeToString(deterministic=True)
    weights = {"a": torch.ones(4, 4), "b": torch.ones(2, dtype=torch.bfloat16)}  # a buffer that keeps its own
    assert export_hugging_face(weights.items(), card, tmp_path) == 68
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config == {"model_type": "qwen3", "é": 1} | written
    assert card.SerializeToString(deterministic=True) == before
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 68
    assert load_file(tmp_path / index["weight_map"]["b"])["b"].dtype is torch.bfloat16
