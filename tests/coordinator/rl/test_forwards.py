"""Tests that the blocks for other models follow from the order of prompts, not from the order of arrival."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp

from services.common.batches import blocks_of
from services.common.config.streaming import block_cutter
from services.common.errors import InternalError
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.rl.blocks import BlockMaker
from tests.coordinator.fake_services import make_config, make_prompt

# A block ends with the group that brings it to 12 tokens, which two groups have.
SHORT = {"max_prompt_tokens": 4}
STAMP = PolicyStamp(version=0, digest="d")


class FakeModel:
    """Answers -(prompt's number + 1) for every token, and remembers what it was asked."""

    def __init__(self, column: str = "ref_logprobs", name: str = "reference"):
        self.name, self.column = name, column
        self.blocks: list[list[str]] = []
        self.error: Exception | None = None

    async def forward(self, samples: pa.Table) -> dict[str, pa.ChunkedArray]:
        self.blocks.append(samples["prompt_id"].to_pylist())
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        rows = [[-(group + 1.0)] * len(tokens) for group, tokens in zip(*_columns(samples), strict=True)]
        return {self.column: pa.chunked_array([pa.array(rows, pa.list_(pa.float32()))])}


def _columns(samples: pa.Table) -> tuple[list[int], list[list[int]]]:
    return samples["group"].to_pylist(), samples["tokens"].to_pylist()


def group(index: int, num_samples: int = 2, length: int = 0) -> ScoredGroup:
    length = length or index % 3 + 1
    completion = Completion(tokens=[4] * length, logprobs=[-1.0] * length)
    completion.finish_reason = FinishReason.FINISH_REASON_STOP
    scores = [Score(reward=0.0)] * num_samples
    return ScoredGroup(index, make_prompt(index), [completion] * num_samples, STAMP, scores, "s")


async def run(
    model: FakeModel, arrivals: Sequence[int], useful: set[int], wanted: int, num_ranks: int = 1
) -> list[ScoredGroup]:
    config = make_config(
        data={"train": "x.parquet", "prompts_per_step": wanted, **SHORT},
        rollout={
            "completions_per_prompt": 2,
            "max_samples": 1,
            "sampling": {"max_tokens": 4},
        },  # one sample at a time, so that groups are in the order of prompts
        trainer={"num_ranks": num_ranks, "max_tokens_per_microbatch": 16},
    )
    models: Any = [model]
    async with BlockMaker(models, config, {}).begin() as blocks:
        for place in arrivals:
            blocks.decide(place, group(place) if place in useful else None)
            await asyncio.sleep(0)
        chosen = sorted(useful)[:wanted]
        return await blocks.complete([group(index) for index in chosen])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_shares_a_block_does_not_depend_on_the_order_of_arrival(data: st.DataObject) -> None:
    num_places = data.draw(st.integers(4, 24))
    useful = data.draw(st.sets(st.integers(0, num_places - 1), min_size=4))
    wanted = data.draw(st.integers(1, len(useful)))
    order = data.draw(st.permutations(range(num_places)))
    in_order, shuffled = FakeModel(), FakeModel()
    asyncio.run(run(in_order, range(num_places), useful, wanted))
    groups = asyncio.run(run(shuffled, order, useful, wanted))
    assert sorted(shuffled.blocks) == sorted(in_order.blocks)
    assert [one.index for one in groups] == sorted(useful)[:wanted]
    for one in groups:
        lengths = [len(completion.tokens) for completion in one.completions]
        logprobs = [of_row.tolist() for of_row in one.columns["ref_logprobs"]]
        assert logprobs == [[-(one.index + 1.0)] * length for length in lengths]


async def test_a_block_is_computed_while_later_groups_are_still_under_way() -> None:
    model = FakeModel()
    await run(model, range(16), set(range(16)), 16)
    assert [len(block) for block in model.blocks] == [4] * 8  # two groups of two samples
    partial: Any = FakeModel()
    config = make_config(
        data={"train": "x.parquet", "prompts_per_step": 16, **SHORT},
        rollout={
            "completions_per_prompt": 2,
            "max_samples": 1,
            "sampling": {"max_tokens": 4},
        },  # one sample at a time, so that groups are in the order of prompts
        trainer={"max_tokens_per_microbatch": 16},
    )
    async with BlockMaker([partial], config, {}).begin() as blocks:
        for place in (1, 0, 3):
            blocks.decide(place, group(place))
        while not partial.blocks:
            await asyncio.sleep(0)
        assert partial.blocks == [["p0", "p0", "p1", "p1"]]  # 3 waits for 2
        blocks.decide(2, None)
        await blocks.complete([group(index) for index in (0, 1, 3)])
        assert partial.blocks[1:] == [["p3", "p3"]]


async def test_blocks_in_the_order_of_length() -> None:
    config = make_config(
        data={"train": "x.parquet", "prompts_per_step": 4, **SHORT},
        rollout={"completions_per_prompt": 2, "sampling": {"max_tokens": 4}},
        trainer={"max_tokens_per_microbatch": 16},
    )
    lengths, blocks = {f"p{index}": 2 for index in range(4)}, []
    forwards = BlockMaker([], config, lengths)
    groups = [group(index) for index in range(4)]  # of 1, 2, 3 and 1 tokens
    async with forwards.begin(blocks.append) as batch:
        for one in groups:
            batch.begin(one.index, one.prompt)
        lengths |= {"p1": 2, "p2": 2, "p3": 1}
        batch.decide(0, groups[0])
        batch.decide(3, groups[3])
        while not blocks:
            await asyncio.sleep(0)
        assert [one.index for one in blocks[0]] == [0, 3]
        batch.decide(2, groups[2])
        batch.decide(1, groups[1])
        done = await batch.complete(forwards.in_order(groups))
    assert [one.index for one in done] == [0, 3, 1, 2] == [one.index for block in blocks for one in block]


@given(
    st.lists(st.integers(1, 30), min_size=16, max_size=16),
    st.sampled_from([1, 2]),
    st.sampled_from([32, 64, 2]),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_blocks_are_those_that_the_recorded_batch_is_cut_into(
    lengths: list[int], num_minibatches: int, max_samples: int, random: random.Random
) -> None:
    """Tests the orders of prompts and of lengths, whatever order the groups arrive in."""
    config = make_config(
        data={"train": "x.parquet", "prompts_per_step": 16, "max_prompt_tokens": 10},
        rollout={"completions_per_prompt": 2, "max_samples": max_samples, "sampling": {"max_tokens": 30}},
        trainer={"max_tokens_per_microbatch": 60, "num_minibatches": num_minibatches},
    )
    known = {f"p{index}": length for index, length in enumerate(lengths)}
    forwards, blocks = BlockMaker([], config, known), []
    groups = [group(index, length=length) for index, length in enumerate(lengths)]

    async def draw() -> None:
        async with forwards.begin(blocks.append) as batch:
            known.update((f"p{index}", length) for index, length in enumerate(lengths))
            for one in groups:
                batch.begin(one.index, one.prompt)
            for one in random.sample(groups, len(groups)):
                batch.decide(one.index, one)
                await asyncio.sleep(0)
            await batch.complete(forwards.in_order(groups))

    asyncio.run(draw())
    cutter = block_cutter(config)
    assert cutter
    cut = blocks_of(to_table(forwards.in_order(groups)), cutter)
    assert [to_table(block) for block in blocks] == cut
    assert len(cut) > num_minibatches


async def test_every_rank_gets_a_sample() -> None:
    model = FakeModel()
    (one,) = await run(model, range(3), {0}, 3, num_ranks=5)
    assert [len(block) for block in model.blocks] == [6]  # 2 samples, three times
    assert len(one.columns["ref_logprobs"]) == 2


async def test_a_failure_ends_the_step_as_it_is() -> None:
    model = FakeModel()
    model.error = InternalError("no memory")
    with pytest.raises(InternalError, match="no memory"):
        await run(model, range(8), set(range(8)), 8)
