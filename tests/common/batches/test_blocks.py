"""Tests that the hash of samples depends on their values only, and where a batch is cut into blocks."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import BlockCutter, blocks_of, content_sha256, decode, encode, tokens_of_groups
from tests.support import make_batch, with_routed_experts

STAMP = PolicyStamp(version=1, digest="d")


def test_the_same_samples_have_the_same_hash_wherever_they_come_from(tmp_path: Path) -> None:
    table = with_routed_experts(make_batch(4, 3, STAMP))
    pq.write_table(table, tmp_path / "batch.parquet", compression="zstd")
    expected = content_sha256(table)
    assert content_sha256(pq.read_table(tmp_path / "batch.parquet")) == expected
    assert content_sha256(decode(encode(table, frame_bytes=1000))) == expected
    assert content_sha256(pa.concat_tables([table.slice(0, 5), table.slice(5)])) == expected
    assert content_sha256(pa.concat_tables([table.slice(5), table.slice(0, 5)])) != expected


@pytest.mark.parametrize(
    "name", ["policy_version", "policy_digest", "seed", "tokens", "logprobs", "advantages", "routed_experts"]
)
def test_other_samples_have_another_hash(name: str) -> None:
    table = with_routed_experts(make_batch(4, 3, STAMP))
    column = table[name].to_pylist()
    column[2] = [*column[2], column[2][0]] if isinstance(column[2], list) else type(column[2])(7)
    index = table.schema.get_field_index(name)
    other = table.set_column(index, table.schema.field(name), pa.array(column, table.schema.field(name).type))
    assert content_sha256(other) != content_sha256(table)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(0, 8),
)
@settings(max_examples=100, deadline=None)
def test_a_block_ends_once_it_has_enough_tokens_or_with_its_minibatch(
    sizes: list[int], full: int, groups_per_minibatch: int, num_samples: int, growth: int
) -> None:
    whole = make_batch(len(sizes), num_samples, STAMP)
    prompt = whole.schema.get_field_index("prompt_tokens")
    rows = [[2] * (size + 1) for size in sizes for _ in range(num_samples)]  # the last token is predicted only
    whole = whole.set_column(prompt, whole.schema.field(prompt), pa.array([[3]] * len(rows), pa.list_(pa.uint32())))
    tokens = whole.schema.get_field_index("tokens")
    whole = whole.set_column(tokens, whole.schema.field(tokens), pa.array(rows, pa.list_(pa.uint32())))
    blocks = blocks_of(whole, BlockCutter(full, groups_per_minibatch, growth))
    assert pa.concat_tables(blocks) == whole
    enough = (full % growth or growth) if growth else full
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        groups = block["group"].unique().to_pylist()
        counts = [num_samples * (sizes[group] + 1) for group in groups]
        assert tokens_of_groups(block) == counts
        assert sum(counts[:-1]) < enough
        crossed = [group for group in groups[1:] if groups_per_minibatch and group % groups_per_minibatch == 0]
        assert crossed == []
        if after is not None and sum(counts) < enough:
            assert after["group"][0].as_py() % groups_per_minibatch == 0
        enough = min(enough + growth, full)
