"""Tests the weight map: the checkpoint tensors that make up a Megatron parameter, and its shards."""

from typing import Any

import pytest
import torch

from services.common.errors import InternalError
from services.common.families.architecture import Architecture
from services.common.families.registry import FAMILIES
from services.trainer.megatron.weights import WeightMap


def shape_of(model_type: str = "qwen3", **changes: Any) -> Architecture:
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 3, "hidden_size": 24, "vocab_size": 16}
    sizes |= {"num_layers": 2, "max_position_embeddings": 32, "tie_word_embeddings": False, "intermediate_size": 8}
    if "num_experts" in FAMILIES[model_type].keys:
        sizes |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        sizes |= {"shared_expert_intermediate_size": 12}
    if "kv_lora_rank" in FAMILIES[model_type].keys:  # keys of 2 + 1 numbers, values of 5
        sizes |= {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 1, "v_head_dim": 5}
    return Architecture(model_type=model_type, **sizes | changes)


# Name of the local layers, name of TransformerEngine's, model family, shapes of the checkpoint tensors.
PARAMETERS = [
    ("embedding.word_embeddings.weight", None, "qwen3", [(16, 24)]),
    ("output_layer.weight", None, "qwen3", [(16, 24)]),
    ("decoder.final_layernorm.weight", None, "qwen3", [(24,)]),
    ("self_attention.linear_qkv.weight", None, "qwen3", [(24, 24), (12, 24), (12, 24)]),
    ("self_attention.linear_qkv.bias", None, "qwen2", [(24,), (12,), (12,)]),
    ("self_attention.linear_proj.weight", None, "qwen3", [(24, 24)]),
    ("self_attention.q_layernorm.weight", None, "qwen3", [(3,)]),
    ("self_attention.k_layernorm.weight", None, "qwen3", [(3,)]),
    ("self_attention.k_layernorm.weight", None, "olmo2", [(12,)]),
    ("mlp_bda.norm.weight", None, "olmo2", [(24,)]),
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "llama", [(24,)]),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "llama", [(24,)]),
    ("mlp.linear_fc1.weight", None, "llama", [(8, 24), (8, 24)]),
    ("mlp.linear_fc2.weight", None, "llama", [(24, 8)]),
    ("self_attention.linear_qkv.weight", None, "phi3", [(48, 24)]),
    ("mlp.linear_fc1.weight", None, "phi3", [(16, 24)]),
    ("mlp.shared_experts.linear_fc1.weight", None, "qwen2_moe", [(12, 24), (12, 24)]),
    ("mlp.shared_experts.linear_fc2.weight", None, "qwen2_moe", [(24, 12)]),
    ("mlp.shared_experts.gate_weight", None, "qwen2_moe", [(1, 24)]),
    ("self_attention.linear_q_down_proj.weight", None, "deepseek_v3", [(10, 24)]),
    ("self_attention.linear_q_up_proj.weight", None, "deepseek_v3", [(24, 10)]),
    ("self_attention.q_layernorm.weight", None, "deepseek_v3", [(10,)]),
    ("self_attention.linear_kv_down_proj.weight", None, "deepseek_v3", [(13, 24)]),
    ("self_attention.linear_kv_up_proj.weight", None, "deepseek_v3", [(56, 12)]),
    ("self_attention.kv_layernorm.weight", None, "deepseek_v3", [(12,)]),
    ("self_attention.linear_proj.weight", None, "deepseek_v3", [(24, 40)]),
    ("mlp.router.weight", None, "qwen3_moe", [(6, 24)]),
    ("mlp.router.bias", None, "gpt_oss", [(6,)]),
    ("self_attention.core_attention.softmax_offset", None, "gpt_oss", [(8,)]),
    ("mlp.experts.gate_up_proj", None, "gpt_oss", [(6, 24, 16)]),
    ("mlp.experts.gate_up_proj_bias", None, "gpt_oss", [(6, 16)]),
    ("mlp.experts.down_proj", None, "gpt_oss", [(6, 8, 24)]),
    ("mlp.experts.down_proj_bias", None, "gpt_oss", [(6, 24)]),
    ("mlp.router.expert_bias", None, "glm4_moe", [(6,)]),
    ("mlp.experts.local_experts.5.linear_fc1.weight", "mlp.experts.linear_fc1.weight5", "qwen3_moe", [(8, 24)] * 2),
    ("mlp.experts.local_experts.5.linear_fc2.weight", "mlp.experts.linear_fc2.weight5", "mixtral", [(24, 8)]),
]


WHOLE = ("norm", "router", "gate_weight", "down_proj")


def full_name(name: str) -> str:
    return name if name.startswith(("embedding", "output", "decoder")) else f"decoder.layers.1.{name}"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("name", "family", "shapes"), [(p[0], p[2], p[3]) for p in PARAMETERS])
def test_joined_shards_are_the_checkpoint_bit_by_bit(
    name: str, family: str, shapes: list[tuple[int, ...]], size: int
) -> None:
    part = WeightMap(shape_of(family)).part(full_name(name))
    tensors = [torch.randn(shape) for shape in shapes]
    assert len(part.names) == len(tensors)
    shards = [part.cut(tensors, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    joined = part.join(shards)
    assert all(torch.equal(a, b) for a, b in zip(joined, tensors, strict=True))
    is_cut = (family, name.rpartition(".")[2]) == ("gpt_oss", "down_proj") or (family == "olmo2" and "k_l" in name)
    if is_cut or not any(w in name for w in WHOLE):
        assert sum(shard.numel() for shard in shards) == sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize(("name", "family", "shapes"), [(p[0], p[2], p[3]) for p in PARAMETERS])
def test_views_of_a_parameter_have_the_numbers_of_its_tensors(
    name: str, family: str, shapes: list[tuple[int, ...]]
) -> None:
    part = WeightMap(shape_of(family)).part(full_name(name))
    tensors = [torch.randn(shape) for shape in shapes]
    whole = part.cut(tensors, 0, 1).clone()
    if part.views is None:
        assert part.views is None
        return
    views = part.views(whole)
    assert {view.untyped_storage().data_ptr() for view in views} == {whole.data_ptr()}
    assert all(torch.equal(view.reshape(a.shape), a) for view, a in zip(views, tensors, strict=True))


@pytest.mark.parametrize("name", ["linear_fc1.weight5", "linear_fc2.weight5"])
def test_a_whole_expert_is_not_copied(name: str) -> None:
    parameter = torch.randn(16, 24)
    joined = WeightMap(shape_of("qwen3_moe")).part(f"decoder.layers.1.mlp.experts.{name}").join([parameter])
    assert {tensor.untyped_storage().data_ptr() for tensor in joined} == {parameter.untyped_storage().data_ptr()}


@pytest.mark.parametrize("size", [8, 16])
def test_key_value_group_can_be_cut_too(size: int) -> None:
    part = WeightMap(shape_of()).part("decoder.layers.0.self_attention.linear_qkv.weight")
    tensors = [torch.randn(rows, 24) for rows in (24, 12, 12)]
    shards = [part.cut(tensors, rank, size) for rank in range(size)]
    assert {shard.shape for shard in shards} == {(48 // size, 24)}
    assert all(torch.equal(a, b) for a, b in zip(part.join(shards), tensors, strict=True))


def test_queries_lie_with_their_key_value_group() -> None:
    part = WeightMap(shape_of()).part("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = torch.arange(24.0)[:, None], 100 + torch.arange(12.0)[:, None], 200 + torch.arange(12.0)[:, None]
    # 4 groups of 2 query heads, a key and a value head, 3 rows each; the second of 2 ranks has groups 2 and 3.
    want = [*range(12, 18), *range(106, 109), *range(206, 209), *range(18, 24), *range(109, 112), *range(209, 212)]
    assert part.cut([q, k, v], 1, 2)[:, 0].tolist() == want


@pytest.mark.parametrize(("local", "te", "family"), [p[:3] for p in PARAMETERS if p[1]])
def test_names_of_transformer_engine_are_known_too(local: str, te: str, family: str) -> None:
    weight_map = WeightMap(shape_of(family))
    one, other = weight_map.part(full_name(local)), weight_map.part(full_name(te))
    assert (one.names, one.order, one.is_expert) == (other.names, other.order, other.is_expert)


def test_a_fused_checkpoint_tensor_has_its_parts_one_below_the_other() -> None:
    name, rows = "decoder.layers.1.self_attention.linear_qkv.weight", (24, 12, 12)
    fused, apart = (WeightMap(shape_of(family)).part(name) for family in ("phi3", "qwen3"))
    parts = [torch.randn(height, 24) for height in rows]
    assert fused.names == ("model.layers.1.self_attn.qkv_proj.weight",) and fused.views is None
    for size in (1, 2, 4, 8):
        for rank in range(size):
            assert torch.equal(fused.cut([torch.cat(parts)], rank, size), apart.cut(parts, rank, size))


def test_experts_have_their_familys_names() -> None:
    def names(family: str, name: str) -> tuple[str, ...]:
        return WeightMap(shape_of(family)).part(f"decoder.layers.1.{name}").names

    moe, mixtral = "model.layers.1.mlp", "model.layers.1.block_sparse_moe"
    fc1, fc2 = (f"mlp.experts.local_experts.3.linear_fc{n}.weight" for n in (1, 2))
    assert names("qwen3_moe", fc1) == (f"{moe}.experts.3.gate_proj.weight", f"{moe}.experts.3.up_proj.weight")
    assert names("mixtral", fc1) == (f"{mixtral}.experts.3.w1.weight", f"{mixtral}.experts.3.w3.weight")
    assert names("mixtral", fc2) == (f"{mixtral}.experts.3.w2.weight",)
    assert names("mixtral", "mlp.router.weight") == (f"{mixtral}.gate.weight",)


def test_orders_are_all_different_and_go_from_the_embedding_to_the_head() -> None:
    weight_map = WeightMap(shape_of("qwen3_moe"))
    others = ("self_attention.linear_qkv.bias", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
    apart = ("phi3", "qwen2_moe", "glm4_moe", "deepseek_v3", "olmo2", "gpt_oss")
    names = [full_name(p[0]) for p in PARAMETERS if p[0] not in others and p[2] not in apart]
    names += [name.replace("layers.1", "layers.0").replace("experts.5", "experts.2") for name in names[3:]]
    ordered = sorted(names, key=lambda name: weight_map.part(name).order)
    assert ordered[0] == "embedding.word_embeddings.weight"
    assert ordered[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]
    assert [name for name in ordered if "layers.1" in name] == [
        n for n in ordered[len(ordered) // 2 - 1 :] if "1." in n
    ]


def test_tied_head_is_the_embedding_and_is_not_published() -> None:
    weight_map = WeightMap(shape_of(tie_word_embeddings=True))
    assert weight_map.part("output_layer.weight").names == ("model.embed_tokens.weight",)
    assert not weight_map.is_published("output_layer.weight")
    assert weight_map.is_published("embedding.word_embeddings.weight")
    assert WeightMap(shape_of()).is_published("output_layer.weight")


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.0.self_attention.linear_qkv.bias",  # of another family
        "mtp.weight",
        "decoder.layers.0.mlp.shared.weight",
        "",
    ],
)
def test_parameter_that_the_map_does_not_know_is_an_error(name: str) -> None:
    with pytest.raises(InternalError, match="no checkpoint tensor is known"):
        WeightMap(shape_of()).part(name)
