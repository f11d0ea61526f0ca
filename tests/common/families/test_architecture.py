"""Shapes of models, as their config.json has them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidInput, NotFound
from services.common.families.architecture import read_architecture

LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_key_value_heads": 4}
DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
FAMILIES = {
    "llama": {},
    "mistral": {"head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "olmo2": {},
    "olmo3": {},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "deepseek_v3": {**LATENT, **DEEPSEEK, "q_lora_rank": 16, "first_k_dense_replace": 0},
    "glm4_moe_lite": {**LATENT, **DEEPSEEK, "q_lora_rank": None, "mlp_layer_types": ["sparse"] * 3},
    "glm4_moe": {
        "first_k_dense_replace": 0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
    },
}
# Models of the families above with dense layers between those with experts, and the numbers of the dense ones.
MIXED = {
    "deepseek_v3": ({"first_k_dense_replace": 1, "q_lora_rank": None}, {0}),
    "glm4_moe_lite": ({"mlp_layer_types": None}, {0}),
    "qwen3_moe": ({"mlp_only_layers": [1]}, {1}),
    "glm4_moe": ({"first_k_dense_replace": 2, "attention_bias": True, "use_qk_norm": True}, {0, 1}),
    "qwen2_moe": ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, {0, 1, 2}),
}
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def write_model(directory: Path, **content: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    return directory


MOE = BASE | FAMILIES["qwen3_moe"]


@pytest.mark.parametrize(
    ("family", "changes", "dense"),
    [*((family, {}, set()) for family in FAMILIES), *((family, *mixed) for family, mixed in MIXED.items())],
)
def test_shapes_are_those_that_transformers_builds(
    family: str, changes: dict[str, Any], dense: set[int], tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    hf = transformers.AutoConfig.for_model(family, **(BASE | FAMILIES[family] | changes))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf)
    sizes = list(tensor_sizes(model))
    hf.save_pretrained(tmp_path)
    ours = read_architecture(tmp_path)
    assert ours.num_parameters == sum(sizes)
    assert ours.max_position_embeddings == 128 and ours.num_experts_per_tok == (2 if ours.num_experts else 0)
    if not ours.num_experts or ours.has_stacked_experts:  # transformers stacks experts, most checkpoints do not
        assert list(ours.tensor_sizes()) == sizes
    embeddings = ours.embedding_parameters() * (1 if ours.tie_word_embeddings else 2)
    layers = [ours.layer_parameters(n) + ours.num_experts * ours.expert_parameters(n) for n in range(3)]
    assert sum(sizes) == sum(layers) + embeddings + ours.hidden_size
    assert ours.dense_layers == dense
    assert layers == [sum(tensor_sizes(layer)) for layer in model.model.layers]


def tensor_sizes(module: Any) -> Iterator[int]:
    """Yields the sizes of what checkpoints contain: parameters, and the correction biases of routers."""
    yield from (parameter.numel() for parameter in module.parameters())
    yield from (buffer.numel() for name, buffer in module.named_buffers() if name.endswith("correction_bias"))


def test_unusable_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        read_architecture(tmp_path)
    for content, words in (
        ({"model_type": "gpt2"}, ["'gpt2'", "llama", "qwen3_moe"]),
        ({"model_type": "qwen3", **BASE, "vocab_size": None}, ["vocab_size is None"]),
        ({"model_type": "qwen3", **BASE, "head_dim": 0}, ["head_dim is 0, not a size"]),
        ({"model_type": "qwen3", **BASE, "num_key_value_heads": 0}, ["num_key_value_heads is 0, not a size"]),
        ({"model_type": "qwen3", **BASE, "num_key_value_heads": 3}, ["num_key_value_heads 3 does not divide num_att"]),
        ({"model_type": "qwen3"}, ["num_hidden_layers is None, not a size"]),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": 1}, ["mlp_only_layers 1"]),
        ({"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 0}, ["decoder_sparse_step 0"]),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": [0], "intermediate_size": None}, ["intermediate_size"]),
        ([], ["not a JSON object"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(InvalidInput) as caught:
            read_architecture(tmp_path)
        assert all(word in caught.value.message for word in words), caught.value.message
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInput, match="not JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(NotFound, match=r"config\.json cannot be read: it is not a regular file"):
        read_architecture(tmp_path)
