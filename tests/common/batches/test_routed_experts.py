"""Tests the encoding of routed experts, and the parts in which a group's routed experts are sent."""

import json

import numpy as np
import pytest
from lockstep.rollout.v1.rollout_pb2 import CompletionPart

from services.common.errors import InternalError
from services.common.routed_experts import RoutedExpertsShape, from_parts, routed_experts_shape, to_parts

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def test_the_shape_follows_from_the_models_config() -> None:
    shape = routed_experts_shape(json.dumps(QWEN3_30B))
    assert shape == RoutedExpertsShape(48, 128, 8)
    assert shape.row_bytes == 384


@pytest.mark.parametrize("model_type", ["qwen3", "other"])
def test_only_models_with_experts_have_routes(model_type: str) -> None:
    assert routed_experts_shape(json.dumps(QWEN3_30B | {"model_type": model_type})) is None


@pytest.mark.parametrize("config_json", [b"", b"[]", b"\xff"])
def test_what_is_no_config_has_no_routes(config_json: bytes) -> None:
    """A card without config.json, which is refused by name later."""
    assert routed_experts_shape(config_json) is None


def test_dense_layers_have_no_routes() -> None:
    mixed = QWEN3_30B | {"num_hidden_layers": 3, "intermediate_size": 8, "mlp_only_layers": [1]}
    shape = routed_experts_shape(json.dumps(mixed))
    assert shape == RoutedExpertsShape(3, 128, 8, frozenset([1])) and shape.expert_layers == [0, 2]
    given = np.random.default_rng(0).integers(0, 128, (5, 3, 8))
    given[:, 1] = -1  # the engine may return anything
    kept = shape.decode(shape.encode(given))
    assert np.array_equal(kept[:, [0, 2]], given[:, [0, 2]]) and not kept[:, 1].any()


@pytest.mark.parametrize(("num_experts", "row_bytes"), [(256, 6), (257, 12)])
def test_experts_take_one_byte_up_to_256_of_them(num_experts: int, row_bytes: int) -> None:
    shape = RoutedExpertsShape(2, num_experts, 3)
    routed_experts = np.random.default_rng(0).integers(0, num_experts, (5, 2, 3)).astype(np.int64)
    routed_experts[0, 0, 0] = num_experts - 1
    data = shape.encode(routed_experts)
    assert len(data) == 5 * row_bytes == 5 * shape.row_bytes
    assert np.array_equal(shape.decode(data), routed_experts)


@pytest.mark.parametrize("routed_experts", [np.zeros((5, 3, 2)), np.full((5, 2, 3), 4), np.full((5, 2, 3), -1)])
def test_routed_experts_of_another_model_are_refused(routed_experts: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"routed.experts"):
        RoutedExpertsShape(2, 4, 3).encode(routed_experts)


GROUP = [b"abcdefgh" + bytes(range(20)), b"abcdefgX" + bytes(5), b"abcdefgh" + bytes(range(20)), b"abc", b""]


@pytest.mark.parametrize("part_bytes", [1, 7, 1000])
def test_parts_are_put_together_again(part_bytes: int) -> None:
    parts = list(to_parts(GROUP, part_bytes=part_bytes))
    assert all(len(part.data) <= part_bytes for part in parts)
    assert from_parts(parts, len(GROUP)) == GROUP


def test_what_the_samples_share_is_sent_once() -> None:
    sent = list(to_parts(GROUP))
    assert [len(part.data) for part in sent] == [28, 6, 0, 0, 0]
    assert [part.num_shared_bytes for part in sent] == [0, 7, 28, 3, 0]


def test_a_group_without_routed_experts_has_no_parts() -> None:
    assert from_parts([], 4) == []


@pytest.mark.parametrize("completions", [[0, 2], [1], [0, 1, 0], [0]])
def test_missing_parts_and_parts_out_of_order_are_refused(completions: list[int]) -> None:
    with pytest.raises(InternalError, match=r"routed.experts"):
        from_parts([CompletionPart(completion=number, data=b"x") for number in completions], 2)
