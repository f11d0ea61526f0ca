"""Tests that micro-batches have every sample once, within the budget, and that every rank has the same number of
microbatches."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp

from services.common import batches
from services.common.batches import decode_sampling_masks, encode_sampling_masks, packed_lengths
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.common.routed_experts import RoutedExpertsShape
from services.trainer.backend import Role
from services.trainer.contract import OpenRole, TrainState
from services.trainer.samples import check_routed_experts, check_sampling_masks, forward_parts
from services.trainer.stream import BatchTraining
from services.trainer.updates.packing import assign, build_microbatch
from tests.support import make_batch, raises, with_routed_experts, with_sampling_masks
from tests.trainer.fsdp_harness import samples
from tests.trainer.updating import whole_parts

SHAPE = RoutedExpertsShape(2, 4, 2)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    spare=st.integers(0, 100),
    pads_rows=st.booleans(),
)
@example(
    lengths=[10, 10, 10], num_ranks=2, spare=0, pads_rows=False
)  # 3 micro-batches cannot be dealt to 2 ranks, and none can be filled
@example(lengths=[10, 10, 1], num_ranks=2, spare=1, pads_rows=False)
@example(lengths=[10, 10, 1], num_ranks=2, spare=1, pads_rows=True)
def test_assignment(lengths: list[int], num_ranks: int, spare: int, pads_rows: bool) -> None:
    budget = max(lengths) + spare

    def tokens(samples: list[int]) -> int:
        each = [lengths[i] for i in samples]
        return max(each) * len(each) if pads_rows else sum(each)

    try:
        ranks = assign(lengths, num_ranks=num_ranks, max_tokens=budget, pads_rows=pads_rows)
    except InvalidInput:
        # It is refused only if there are too few samples, or where not even pairs could be formed.
        assert len(lengths) < num_ranks or (len(lengths) % num_ranks and budget < 2 * max(lengths))
        return
    microbatches = list(itertools.chain(*ranks))
    assert sorted(itertools.chain(*microbatches)) == list(range(len(lengths)))
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert all(microbatch and microbatch == sorted(microbatch) for microbatch in microbatches)
    assert max(map(tokens, microbatches)) <= budget
    assert ranks == assign(lengths, num_ranks=num_ranks, max_tokens=budget, pads_rows=pads_rows)


def test_padded_rows_of_about_the_same_length_are_together() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.9, 256).astype(int).clip(1, 2048).tolist()
    for num_ranks in (1, 4):
        ranks = assign(lengths, num_ranks=num_ranks, max_tokens=8192, pads_rows=True)
        padded = [[max(lengths[i] for i in one) * len(one) for one in rank] for rank in ranks]
        assert sum(map(sum, padded)) <= 1.25 * sum(lengths)  # in any order it is more than twice as much
        assert max(map(sum, padded)) <= 1.25 * min(map(sum, padded))


async def test_a_backend_that_pads_gets_samples_by_length() -> None:
    stamp = PolicyStamp(version=0, digest="d")
    batch, config = make_batch(4, 3, stamp), TrainerConfig(max_tokens_per_microbatch=64)
    header = pb.TrainHeader(expected_stamp=stamp, batch_id="b", temperature=1.0)
    card = ModelCard(files={"config.json": b'{"vocab_size": 64}'})
    opened = OpenRole(
        Role.POLICY, "", config, pb.OpenRunResponse(model_card=card), [0], TrainState(0, "", {}), digest="d"
    )
    opened = replace(opened, pads_rows=True)
    ranks = AsyncMock()
    training = BatchTraining(ranks, header, opened)
    await training.add(batch)
    (part,) = ranks.call.call_args.args[1]
    ((_, sizes),) = part.body["minibatches"]
    sent, begin = packed_lengths(batches.decode(part.frames)).tolist(), 0
    for size in sizes:
        assert max(sent[begin : begin + size]) * size <= 64
        begin += size


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(50, 100), min_size=8, max_size=64), num_ranks=st.sampled_from([1, 2, 4]))
def test_ranks_and_packs_are_balanced(lengths: list[int], num_ranks: int) -> None:
    ranks = assign(lengths, num_ranks=num_ranks, max_tokens=400)
    totals = [sum(lengths[i] for microbatch in rank for i in microbatch) for rank in ranks]
    # Micro-batches are dealt back and forth, so that ranks differ by at most the spread of micro-batches, and those
    # that get the longest samples first (LPT) differ by at most one sample.
    assert max(totals) - min(totals) <= max(lengths)
    # There are no more micro-batches than a greedy filling makes that leaves up to one sample's room in each, and one
    # round over the ranks.
    assert len(ranks[0]) <= -(-sum(lengths) // (300 * num_ranks)) + 1


def test_what_cannot_be_packed_names_what_to_change() -> None:
    with raises(InvalidInput, field="trainer.max_tokens_per_microbatch"):
        assign([3, 41], num_ranks=1, max_tokens=40)
    with raises(InvalidInput, field="frame"):
        assign([1, 1], num_ranks=3, max_tokens=40)
    with pytest.raises(InvalidInput, match="to at least 20"):
        assign([10, 10, 10], num_ranks=2, max_tokens=10)
    assign([10, 10, 10], num_ranks=2, max_tokens=20)


def test_micro_batch_is_what_its_description_says() -> None:
    table = samples().slice(0, 1)
    for name, value in {"prompt_tokens": [5, 6], "tokens": [7, 8], "logprobs": [-1.0, -2.0]}.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array([value], table.schema.field(index).type))
    microbatch = build_microbatch(
        table.drop_columns(["ref_logprobs"]).append_column(
            table.schema.field("ref_logprobs"), pa.array([[-1.5, -2.5]], pa.list_(pa.float32()))
        )
    )
    assert microbatch.tokens_T.tolist() == [5, 6, 7]
    assert microbatch.predict_N.tolist() == [1, 2]
    assert microbatch.targets_N.tolist() == [7, 8]


@pytest.mark.parametrize("rows", [[0], [3, 1], list(range(12)), [11, 0, 7]])
def test_micro_batch_against_a_naive_construction(rows: list[int]) -> None:
    table = samples().take(pa.array(rows))
    microbatch = build_microbatch(table)
    tokens, positions, starts, predict, targets = [], [], [0], [], []
    names = ("behavior_logprobs", "loss_mask", "advantages", "ref_logprobs", "completion_length")
    flat: dict[str, list[float]] = {name: [] for name in names}
    for row in table.to_pylist():
        whole = row["prompt_tokens"] + row["tokens"]
        for place, token in enumerate(row["tokens"]):
            # The token at index p + place is predicted at the one before it.
            predict.append(len(tokens) + len(row["prompt_tokens"]) + place - 1)
            targets.append(token)
            flat["behavior_logprobs"].append(row["logprobs"][place])
            flat["ref_logprobs"].append(row["ref_logprobs"][place])
            flat["advantages"].append(row["advantages"][place])
            flat["loss_mask"].append(1)
            flat["completion_length"].append(len(row["tokens"]))
        tokens += whole[:-1]
        positions += range(len(whole) - 1)
        starts.append(len(tokens))
    assert microbatch.tokens_T.tolist() == tokens
    assert microbatch.positions_T.tolist() == positions
    assert microbatch.cu_seqlens_B1.tolist() == starts
    assert microbatch.cu_seqlens_B1.dtype == torch.int32
    assert microbatch.max_seqlen == max(b - a for a, b in itertools.pairwise(starts))
    assert (microbatch.predict_N.tolist(), microbatch.targets_N.tolist()) == (predict, targets)
    assert microbatch.columns.keys() == flat.keys()
    for name, values in flat.items():
        np.testing.assert_array_equal(microbatch.columns[name].numpy(), np.array(values, dtype=np.float32))
    cut = microbatch.per_sample(microbatch.columns["behavior_logprobs"])
    assert [part.tolist() for part in cut] == [
        np.array(row["logprobs"], dtype=np.float32).tolist() for row in table.to_pylist()
    ]


def test_reference_column_is_there_only_if_all_have_it() -> None:
    table = samples()
    index = table.schema.get_field_index("ref_logprobs")
    none = table.set_column(index, table.schema.field(index), pa.nulls(len(table), pa.list_(pa.float32())))
    assert "ref_logprobs" not in build_microbatch(none).columns


@pytest.mark.parametrize(("num_ranks", "minibatches"), [(1, 1), (2, 1), (3, 2), (2, 4)])
def test_parts_hold_every_sample_once_in_its_minibatch(num_ranks: int, minibatches: int) -> None:
    table = samples()
    config = TrainerConfig(max_tokens_per_microbatch=40, num_minibatches=minibatches)
    seen: list[list[tuple[int, int]]] = [[] for _ in range(minibatches)]
    for part in whole_parts(table, config, num_ranks):
        rows = batches.decode(part.frames).to_pylist()
        assert len(part.body["minibatches"]) == minibatches
        begin = 0
        for index, (number, sizes) in enumerate(part.body["minibatches"]):
            assert number == index
            size = sum(sizes)
            seen[index] += [_name(table, row) for row in rows[begin : begin + size]]
            begin += size
        assert begin == len(rows)
    for index, share in enumerate(np.split(np.arange(4), minibatches)):
        want = [(r["group"], r["sample"]) for r in table.to_pylist() if r["group"] in share]
        assert sorted(seen[index]) == sorted(want)


def _name(table: pa.Table, narrow: dict) -> tuple[int, int]:
    """Returns the group and sample numbers of the only row of `table` that has the values of `narrow`."""
    rows = [r for r in table.to_pylist() if all(r[name] == value for name, value in narrow.items())]
    assert len(rows) == 1
    return rows[0]["group"], rows[0]["sample"]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_forward_order_undoes_the_packing(num_ranks: int) -> None:
    table = samples()
    parts, order = forward_parts(table, TrainerConfig(max_tokens_per_microbatch=40), num_ranks)
    answered = pa.concat_tables([batches.decode(part.frames) for part in parts])
    assert answered.take(pa.array(order)).equals(table.select(answered.schema.names))


def test_routed_experts_go_with_their_tokens_into_the_micro_batches() -> None:
    table = with_routed_experts(samples())
    microbatch = build_microbatch(table, SHAPE)
    assert microbatch.experts_TLK is not None and microbatch.experts_TLK.shape == (len(microbatch.tokens_T), 2, 2)
    rows = [np.frombuffer(row, np.uint8).reshape(-1, 2, 2) for row in table["routed_experts"].to_pylist()]
    assert np.array_equal(microbatch.experts_TLK.numpy(), np.concatenate(rows))
    assert build_microbatch(table).experts_TLK is None


def test_sampling_masks_go_with_their_tokens_into_the_micro_batches() -> None:
    table = with_sampling_masks(samples())
    microbatch = build_microbatch(table)
    assert microbatch.sampling_mask_NK is not None and microbatch.sampling_mask_NK.dtype == torch.int32
    rows = zip(table["sampling_mask"].to_pylist(), table["tokens"].to_pylist(), strict=True)
    decoded = [decode_sampling_masks(kept, len(tokens)) for kept, tokens in rows]
    counts_N, kept = (np.concatenate(parts) for parts in zip(*decoded, strict=True))
    is_token_NK = microbatch.sampling_mask_NK.numpy() >= 0
    assert is_token_NK.sum(1).tolist() == counts_N.tolist() and counts_N.max() == is_token_NK.shape[1]
    assert microbatch.sampling_mask_NK.numpy()[is_token_NK].tolist() == kept.tolist()
    assert (is_token_NK[:, 1:] <= is_token_NK[:, :-1]).all()  # the padding comes last


def test_only_models_with_a_distribution_get_sampling_masks() -> None:
    config = TrainerConfig()
    for role in (Role.POLICY, Role.REFERENCE, Role.CRITIC):
        (part,), _ = forward_parts(with_sampling_masks(samples()), config, 1, role)
        assert ("sampling_mask" in batches.decode(part.frames).column_names) == (role is not Role.CRITIC)
        (part,), _ = forward_parts(samples(), config, 1, role)
        assert "sampling_mask" not in batches.decode(part.frames).column_names


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda sets, tokens: None, "sampling_mask: row 1 is missing"),
        (lambda sets, tokens: encode_sampling_masks(sets[1:]), "sampling_mask: row 1: .* not the sampling masks of"),
        (
            lambda sets, tokens: encode_sampling_masks([[*sets[0], 64], *sets[1:]]),
            "sampling_mask: row 1 names token 64 of 64",
        ),
        (
            lambda sets, tokens: encode_sampling_masks([[tokens[0] ^ 1], *sets[1:]]),
            "sampling_mask: row 1 .* without the sampled token",
        ),
        (
            lambda sets, tokens: encode_sampling_masks([[], *sets[1:]]),
            "sampling_mask: row 1 .* without the sampled token .* at 0",
        ),
    ],
)
def test_sampling_masks_that_are_not_those_of_the_samples_are_refused(spoil: Callable[..., Any], message: str) -> None:
    table = with_sampling_masks(samples())
    check_sampling_masks(table, vocab_size=64)
    check_sampling_masks(samples(), vocab_size=64)
    rows, tokens = table["sampling_mask"].to_pylist(), table["tokens"][1].as_py()
    counts, kept = decode_sampling_masks(rows[1], len(tokens))
    rows[1] = spoil([part.tolist() for part in np.split(kept, counts.cumsum()[:-1])], tokens)
    column = pa.array(rows, pa.large_binary())
    spoiled = table.set_column(table.schema.names.index("sampling_mask"), "sampling_mask", column)
    with pytest.raises(InvalidInput, match=message) as raised:
        check_sampling_masks(spoiled, vocab_size=64)
    assert raised.value.metadata["field"] == "sampling_mask"


def test_only_a_masked_token_may_have_no_sampling_mask() -> None:
    table = samples()
    counts = [len(tokens) for tokens in table["tokens"].to_pylist()]
    empty = pa.array([encode_sampling_masks([[]] * count) for count in counts], pa.large_binary())
    masked = pa.array([[False] * count for count in counts])
    table = table.set_column(table.schema.names.index("sampling_mask"), "sampling_mask", empty)
    table = table.set_column(table.schema.names.index("loss_mask"), "loss_mask", masked)
    check_sampling_masks(table, vocab_size=64)
    assert build_microbatch(table).sampling_mask_NK.shape == (sum(counts), 0)


def _sent(role: Role, routed: bool = True, **moe: str) -> list[str]:
    table, config = with_routed_experts(samples()) if routed else samples(), TrainerConfig.model_validate({"moe": moe})
    parts, _ = forward_parts(table, config, 1, role)
    return batches.decode(parts[0].frames).column_names


def test_only_a_policy_that_replays_gets_routed_experts() -> None:
    assert "routed_experts" in _sent(Role.POLICY)
    assert "routed_experts" not in _sent(Role.POLICY, router_replay="off")
    assert "routed_experts" not in _sent(Role.POLICY, routed=False)
    assert "routed_experts" not in _sent(Role.REFERENCE)


def test_a_batch_without_routed_experts_is_refused_if_they_must_be_replayed() -> None:
    config = TrainerConfig.model_validate({"moe": {"router_replay": "on"}})
    with raises(InvalidInput, field="routed_experts"):
        whole_parts(samples(), config, 1)
    assert whole_parts(with_routed_experts(samples()), config, 1)


def _changed(change: dict[int, bytes | None]) -> pa.Table:
    table = with_routed_experts(samples())
    rows = table["routed_experts"].to_pylist()
    for index, row in change.items():
        rows[index] = row
    column = pa.array(rows, pa.large_binary())
    return table.set_column(table.schema.names.index("routed_experts"), table.schema.field("routed_experts"), column)


WHOLE = with_routed_experts(samples())["routed_experts"][2].as_py()
BAD_ROUTED_EXPERTS = {
    "one is missing": ({2: None}, "row 2 is missing"),
    "a row too few": ({2: WHOLE[:-4]}, "row 2 has another number of tokens"),
    "a row too many": ({2: WHOLE + WHOLE[:4]}, "row 2 has another number of tokens"),
    "an expert that does not exist": ({2: b"\4" + WHOLE[1:]}, "row 2 names expert 4, but there are only 4"),
    "slots that were never written": ({2: bytes(len(WHOLE))}, "row 2 names an expert twice"),
}


@pytest.mark.parametrize("case", BAD_ROUTED_EXPERTS)
def test_routed_experts_that_are_not_those_of_the_samples_are_refused(case: str) -> None:
    change, why = BAD_ROUTED_EXPERTS[case]
    with pytest.raises(InvalidInput, match=why):
        check_routed_experts(_changed(change), SHAPE)


def test_routed_experts_are_checked_only_if_there_are_any_and_a_dense_model_has_none() -> None:
    check_routed_experts(with_routed_experts(samples()), SHAPE)
    check_routed_experts(samples(), SHAPE)
    check_routed_experts(samples(), None)
    with raises(InvalidInput, field="routed_experts"):
        check_routed_experts(with_routed_experts(samples()), None)
