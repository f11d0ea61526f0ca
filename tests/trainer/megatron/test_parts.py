"""Tests the Megatron backend's pure parts: micro-batches, pass-through tables, offload."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import services.trainer.megatron  # noqa: F401  (before megatron itself)
from services.common.errors import InvalidInput
from services.trainer.backend import Offloader
from services.trainer.megatron.microbatch import Cut, MicrobatchShard, cut_microbatches, least_sizes, zigzag
from services.trainer.megatron.settings import make
from services.trainer.updates.packing import Microbatch

quick = settings(max_examples=60, deadline=None)

# ---- Micro-batches

# A micro-batch is drawn as a list of (prompt tokens, completion tokens), one pair for each of its sequences.
microbatches_of = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4), min_size=1, max_size=4
)


def make_microbatch(sizes: Sequence[tuple[int, int]], first_token: int) -> Microbatch:
    """Makes a micro-batch whose tokens count up from `first_token`, so that each shows its place; targets are token +
    1000."""
    lengths = [prompt + completion - 1 for prompt, completion in sizes]
    total = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    predict = torch.cat([torch.arange(end - c, end) for end, (_, c) in zip(ends, sizes, strict=True)])
    tokens = torch.arange(first_token, first_token + total)
    return Microbatch(
        tokens_T=tokens,
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_B1=torch.tensor([0, *ends], dtype=torch.int32),
        lengths=tuple(lengths),
        predict_N=predict,
        targets_N=tokens[predict] + 1000,
        completion_lengths=tuple(c for _, c in sizes),
        columns={},
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Holds micro-batches, and how they are cut for every context-parallel rank: `cut[rank][micro-batch]`."""

    microbatches: list[Microbatch]
    cut: list[list[MicrobatchShard]]
    align: int
    is_packed: bool
    is_fixed_size: bool
    multiple: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    first, microbatches = 1, []
    for sizes in draw(microbatches_of):
        microbatches.append(make_microbatch(sizes, first))
        first += len(microbatches[-1].tokens_T)
    cp, tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    align = tp * (2 * cp if cp > 1 else 1)
    is_packed, is_fixed = draw(st.booleans()), draw(st.booleans())
    multiple = draw(st.sampled_from([1, 5, 16 * tp * cp]))
    cuts = [Cut(cp, rank, align, is_packed, multiple) for rank in range(cp)]
    sizes = least_sizes(microbatches, cuts[0])
    if is_fixed:
        sizes[:] = sizes.max(0)
    cut = [cut_microbatches(microbatches, one, sizes) for one in cuts]
    return Case(microbatches, cut, align, is_packed, is_fixed, multiple)


@quick
@given(cases())
def test_every_token_is_on_exactly_one_context_parallel_rank(case: Case) -> None:
    for index, microbatch in enumerate(case.microbatches):
        tokens = torch.cat([shards[index].tokens.flatten() for shards in case.cut])
        assert tokens[tokens > 0].sort().values.tolist() == microbatch.tokens_T.tolist()


@quick
@given(cases())
def test_every_prediction_is_made_once_by_the_row_of_its_token(case: Case) -> None:
    for index, microbatch in enumerate(case.microbatches):
        seen: list[int] = []
        for shards in case.cut:
            shard = shards[index]
            tokens_SB = shard.tokens.T.flatten()  # like the model's [S, B] output
            assert torch.equal(shard.targets.tokens_M, microbatch.targets_N[shard.where_M])
            assert torch.equal(tokens_SB[shard.rows_M] + 1000, shard.targets.tokens_M)
            seen += shard.where_M.tolist()
        assert sorted(seen) == list(range(len(microbatch.targets_N)))


@quick
@given(cases())
def test_padded_lengths_divide_and_follow_the_micro_batches(case: Case) -> None:
    cp = len(case.cut)
    for shards in case.cut:
        for microbatch, shard in zip(case.microbatches, shards, strict=True):
            assert shard.num_rows == shard.tokens.numel()
            assert shard.num_rows * cp % case.multiple == 0
            if not case.is_packed:
                assert shard.packed is None
                assert shard.tokens.size(1) * cp % case.align == 0
                continue
            starts = shard.packed.cu_seqlens_q
            assert torch.equal(starts, shard.packed.cu_seqlens_kv) and starts.dtype == torch.int32
            padded = starts.diff().tolist()
            assert sum(padded) == shard.tokens.numel() * cp
            assert all(length > 0 and length % case.align == 0 for length in padded)
            assert all(0 <= full - n < case.align for n, full in zip(microbatch.lengths, padded, strict=False))
            assert shard.packed.max_seqlen_q == shard.packed.max_seqlen_kv == max(padded)


@quick
@given(cases())
def test_micro_batches_have_one_shape_where_the_pipeline_needs_it(case: Case) -> None:
    shapes = {shard.tokens.shape for shards in case.cut for shard in shards}
    if case.is_fixed_size:
        assert len(shapes) == 1
    elif case.is_packed:
        for index, microbatch in enumerate(case.microbatches):
            most = sum(microbatch.lengths) + case.align * len(microbatch.lengths)
            most += math.lcm(case.align, case.multiple) * (case.multiple > 1)
            assert case.cut[0][index].num_rows * len(case.cut) < most


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_zigzag_gives_each_rank_as_much_causal_attention(cp: int) -> None:
    parts = [zigzag(16, cp, rank) for rank in range(cp)]
    assert torch.cat(parts).sort().values.tolist() == list(range(16))
    assert len({int((part + 1).sum()) for part in parts}) == 1


# ---- Pass-through tables


def ddp(**given_keys: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return make(DistributedDataParallelConfig, {"use_distributed_optimizer": True}, given_keys, "megatron.ddp_config")


def transformer(**given_keys: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    known = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    return make(TransformerConfig, known, given_keys, "megatron.transformer_config_kwargs")


def test_given_keys_go_over_ours() -> None:
    config = ddp(overlap_grad_reduce=True, use_distributed_optimizer=False)
    assert config.overlap_grad_reduce and not config.use_distributed_optimizer


def test_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        InvalidInput, match=r"megatron\.ddp_config\.overlap_grad_reduc:.*did you mean overlap_grad_reduce\?"
    ) as caught:
        ddp(overlap_grad_reduc=True)
    assert caught.value.metadata["field"] == "megatron.ddp_config.overlap_grad_reduc"
    with pytest.raises(InvalidInput) as caught:
        ddp(xyzzy=1)
    assert "did you mean" not in str(caught.value)


def test_names_of_dtypes_and_kernels_become_what_megatron_wants() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.enums import AttnBackend

    optimizer = make(OptimizerConfig, {}, {"params_dtype": "bf16", "main_grads_dtype": "fp32"}, "t")
    assert (optimizer.params_dtype, optimizer.main_grads_dtype) == (torch.bfloat16, torch.float32)
    config = transformer(attention_backend="flash", moe_router_dtype="fp32", params_dtype="bf16")
    assert (config.attention_backend, config.moe_router_dtype) == (AttnBackend.flash, "fp32")
    assert config.params_dtype == torch.bfloat16


@pytest.mark.parametrize(("key", "value"), [("params_dtype", "float31"), ("attention_backend", "cudnn")])
def test_name_that_is_none_of_the_choices_is_refused(key: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"{key}: '{value}' is not one of"):
        transformer(**{key: value})


def test_combination_that_megatron_refuses_names_the_table() -> None:
    with pytest.raises(InvalidInput, match=r"megatron\.transformer_config_kwargs: Megatron refuses"):
        transformer(recompute_granularity="sometimes")


# ---- Offload


class Groups:
    """Holds a flat buffer with two views, gradients, moments, and a master weight in the parameters' own memory."""

    def __init__(self) -> None:
        self.flat = torch.arange(8.0)
        self.views = [self.flat[:3], self.flat[3:].view(5, 1)]
        self.grads = torch.ones(8)
        self.moments = torch.arange(10.0, 14.0)
        self.master = self.flat[2:6]

    def offloader(self, *leaving: str) -> Offloader:
        groups = {
            "params": lambda: self.views,
            "grads": lambda: [self.grads],
            "optimizer": lambda: [self.master, self.moments],
        }
        return Offloader(groups, frozenset(leaving), torch.device("cpu"))

    def sizes(self) -> tuple[int, int, int]:
        return tuple(tensor.untyped_storage().nbytes() for tensor in (self.flat, self.grads, self.moments))


@pytest.mark.parametrize(
    ("leaving", "sizes"),
    [
        ((), (32, 32, 16)),
        (("params",), (0, 32, 16)),
        (("grads",), (32, 0, 16)),
        # The parameters stay, though the master weight in them is the optimizer's too: a forward needs them without it.
        (("optimizer",), (32, 32, 0)),
        (("params", "grads", "optimizer"), (0, 0, 0)),
    ],
)
def test_only_what_was_asked_for_leaves(leaving: tuple[str, ...], sizes: tuple[int, int, int]) -> None:
    groups = Groups()
    offloader = groups.offloader(*leaving)
    offloader.offload("params", "grads", "optimizer")
    assert groups.sizes() == sizes
    offloader.offload("params", "grads", "optimizer")  # nothing happens twice
    offloader.load("params", "grads", "optimizer")
    offloader.load("params", "grads", "optimizer")
    assert groups.flat.tolist() == list(range(8))
    assert groups.moments.tolist() == [10, 11, 12, 13]
    assert groups.grads.tolist() == [0.0 if "grads" in leaving else 1.0] * 8


def test_views_share_memory_after_they_came_back() -> None:
    groups = Groups()
    offloader = groups.offloader("params", "grads", "optimizer")
    pointers = [view.untyped_storage()._cdata for view in groups.views]
    for _ in range(3):
        offloader.offload("params", "grads", "optimizer")
        offloader.load("params", "optimizer")
        groups.flat += 1
    assert [view.untyped_storage()._cdata for view in groups.views] == pointers
    assert groups.views[0].tolist() == [3, 4, 5]
    assert groups.views[1].flatten().tolist() == [6, 7, 8, 9, 10]
    assert groups.master.tolist() == [5, 6, 7, 8]


def test_memory_of_two_groups_is_there_with_the_first() -> None:
    groups = Groups()
    offloader = groups.offloader("params", "optimizer")
    offloader.offload("optimizer", "params")
    offloader.load("params")
    assert groups.sizes() == (32, 32, 0)
    assert groups.master.tolist() == [2, 3, 4, 5]
