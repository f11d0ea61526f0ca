"""Tests the coordinates of each rank, and which layers, experts and weights of a model it holds."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from services.common.config.layout import Layout, rank_map
from services.common.config.megatron import RESERVED
from tests.common.megatron.test_layout import DENSE, MOE


def many_layouts() -> Iterator[Layout]:
    for tp, cp, dp, pp, ep, etp in itertools.product((1, 2, 4), (1, 3), (1, 2, 4), (1, 2, 3), (1, 2, 4), (1, 2)):
        if tp * cp * dp % (ep * etp) == 0:
            yield Layout(tp * cp * dp * pp, tp, pp, 1, cp, ep, etp, dp)


_ASK_MEGATRON = """
import dataclasses, json, sys
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import MLATransformerConfig

ORDER = "tp-cp-ep-dp-pp"
groups = []
for tp, cp, dp, pp, ep, etp, edp in json.loads(sys.argv[1]):
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=ORDER)
    of_dense = {token: dense.get_ranks(token) for token in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp")}
    groups.append([of_dense, {token: expert.get_ranks(token) for token in ("tp", "ep", "dp", "pp", "tp-ep")}])
classes = [MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig]
print(json.dumps([groups, [[field.name for field in dataclasses.fields(cls)] for cls in classes]]))
"""


@pytest.fixture(scope="module")
def megatron_says() -> tuple[list[Any], list[list[str]]]:
    """Asks a process without the CPU shim for Megatron's groups of `many_layouts` and for its config keys."""
    pytest.importorskip("megatron.core", reason="the coordinator's environment has no Megatron")
    sizes = [(at.tp, at.cp, at.dp, at.pp, at.ep, at.etp, at.edp) for at in many_layouts()]
    command = [sys.executable, "-W", "ignore", "-c", _ASK_MEGATRON, json.dumps(sizes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    groups, keys = json.loads(done.stdout.splitlines()[-1])
    return groups, keys


def groups_of(layout: Layout, names: tuple[str, ...], along: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Returns the groups of ranks that, of the coordinates `names`, differ only in those of `along`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for at in rank_map(layout):
        place = tuple(getattr(at, name) for name in names if name not in along)
        groups.setdefault(place, []).append(at.rank)
    return {tuple(ranks) for ranks in groups.values()}


@pytest.mark.slow
def test_ranks_are_where_megatron_puts_them(megatron_says: tuple[list[Any], Any]) -> None:
    layouts = list(many_layouts())
    assert len(layouts) == len(megatron_says[0]) > 200
    ours = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
    for layout, (dense, expert) in zip(layouts, megatron_says[0], strict=True):
        for token, ranks in dense.items():
            got = groups_of(layout, ("tp", "cp", "dp", "pp"), tuple(token.split("-")))
            assert got == set(map(tuple, ranks)), (layout, token)
        for token, ranks in expert.items():
            along = tuple(ours[name] for name in token.split("-"))
            assert groups_of(layout, ("etp", "ep", "edp", "pp"), along) == set(map(tuple, ranks)), (layout, token)


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


def test_reserved_keys_are_megatrons(megatron_says: tuple[Any, list[list[str]]]) -> None:
    """A reserved key that Megatron has renamed would no longer be refused."""
    tables = ("transformer_config_kwargs", "optimizer_config_kwargs", "ddp_config")
    for table, known in zip(tables, megatron_says[1], strict=True):
        assert set(RESERVED[table]) <= set(known)


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
