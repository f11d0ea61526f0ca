"""Tests the coordinates of a rank, and which layers, experts and weights of a model it holds."""

from dataclasses import replace

from services.common.config.layout import Layout, rank_map
from tests.common.megatron.test_layout import DENSE, MOE


def test_coordinates_count_up_along_their_groups() -> None:
    """A comparison of groups alone would not notice two stages in the wrong order."""
    ranks = rank_map(Layout(world=16, tp=2, pp=2, vpp=1, cp=2, ep=4, etp=1, dp=2))
    assert [(at.tp, at.cp, at.dp, at.pp) for at in ranks[:6]] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 1, 0, 0),
        (0, 0, 1, 0),
        (1, 0, 1, 0),
    ]
    assert [(at.etp, at.ep, at.edp, at.pp) for at in ranks[3:6]] == [(0, 3, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0)]
    assert (ranks[8].pp, ranks[15].pp) == (1, 1)


def test_layers_and_experts_of_a_rank() -> None:
    layout = Layout(world=8, tp=1, pp=2, vpp=2, cp=1, ep=4, etp=1, dp=4)
    assert layout.layers(12, 0) == (range(0, 3), range(6, 9))
    assert layout.layers(12, 1) == (range(3, 6), range(9, 12))
    assert [layout.experts(8, ep) for ep in range(4)] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


def test_the_first_and_the_last_stage_may_have_other_numbers_of_layers() -> None:
    layout = Layout(world=4, tp=1, pp=4, vpp=1, cp=1, ep=1, etp=1, dp=1, first=3, last=2)
    assert [layout.layers(13, pp) for pp in range(4)] == [
        (range(0, 3),),
        (range(3, 7),),
        (range(7, 11),),
        (range(11, 13),),
    ]
    layout = replace(layout, pp=3, vpp=2, first=4, last=None)
    assert layout.layers(12, 0) == (range(0, 2), range(6, 8)) and layout.layers(12, 2) == (range(4, 6), range(10, 12))


def test_share_of_a_rank() -> None:
    """Tests that TP cuts matrices, but neither norms nor the router."""
    matrices = 96 * (96 + 32 + 32) + 96 * 96
    llama, mixtral = replace(DENSE, model_type="llama"), replace(MOE, model_type="mixtral")
    assert llama.layer_parameters(0, 4) == (matrices + 3 * 96 * 192) // 4 + 2 * 96
    assert mixtral.layer_parameters(0, 4) == matrices // 4 + 12 * 96 + 2 * 96
    assert mixtral.expert_parameters(0, 4) == 3 * 96 * 36 // 4
    assert replace(llama, model_type="qwen2").layer_parameters(0, 4) == llama.layer_parameters(0, 4) + 160 // 4
    assert replace(llama, model_type="qwen3").layer_parameters(0, 4) == llama.layer_parameters(0, 4) + 2 * 8
    biased = replace(llama, flags=frozenset(["attention_bias"]))
    assert biased.layer_parameters(0, 4) == llama.layer_parameters(0, 4) + 160 // 4 + 96
