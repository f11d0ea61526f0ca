"""Tests that the hash of samples depends on their values only."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches.batch import decode, encode
from services.common.batches.blocks import content_sha256
from tests.support import make_batch, with_routes

STAMP = PolicyStamp(version=1, digest="d")


def test_the_same_samples_have_the_same_hash_wherever_they_come_from(tmp_path: Path) -> None:
    table = with_routes(make_batch(4, 3, STAMP))
    pq.write_table(table, tmp_path / "batch.parquet", compression="zstd")
    expected = content_sha256(table)
    assert content_sha256(pq.read_table(tmp_path / "batch.parquet")) == expected
    assert content_sha256(decode(encode(table, frame_bytes=1000))) == expected
    assert content_sha256(pa.concat_tables([table.slice(0, 5), table.slice(5)])) == expected
    assert content_sha256(pa.concat_tables([table.slice(5), table.slice(0, 5)])) != expected


@pytest.mark.parametrize(
    "name", ["policy_version", "policy_digest", "seed", "tokens", "logprobs", "advantages", "routes"]
)
def test_other_samples_have_another_hash(name: str) -> None:
    table = with_routes(make_batch(4, 3, STAMP))
    column = table[name].to_pylist()
    column[2] = [*column[2], column[2][0]] if isinstance(column[2], list) else type(column[2])(7)
    index = table.schema.get_field_index(name)
    other = table.set_column(index, table.schema.field(name), pa.array(column, table.schema.field(name).type))
    assert content_sha256(other) != content_sha256(table)
