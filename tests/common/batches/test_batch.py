"""Tests Arrow frames: samples survive encoding, and invalid frames are refused before their offsets are followed."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import FRAME_BYTES, SAMPLE_SCHEMA, decode, encode
from services.common.errors import InvalidInput
from services.common.rpc.channel import MAX_MESSAGE_BYTES
from tests.support import make_batch, raises

BATCH = make_batch(4, 3, PolicyStamp(version=3, digest="0" * 32))
(FRAME,) = encode(BATCH)
# The most that Arrow adds to a frame: the header of a stream with this schema, and padding.
OVERHEAD_BYTES = 8 << 10


@pytest.mark.parametrize("frame_bytes", [1, 300, 2000, FRAME_BYTES])
def test_batch_survives_the_wire(frame_bytes: int) -> None:
    frames = list(encode(BATCH, frame_bytes=frame_bytes))
    assert decode(frames, schema=SAMPLE_SCHEMA).equals(BATCH)
    assert len(frames) == (BATCH.num_rows if frame_bytes == 1 else len(frames))


def test_a_long_sample_with_the_experts_of_many_layers_fits_a_message() -> None:
    """Qwen3-235B-A22B has 94 layers of which each gives a token 8 experts."""
    index = SAMPLE_SCHEMA.get_field_index("routed_experts")
    experts = pa.array([bytes(94 * 8 * 262_144)], pa.large_binary())
    (frame,) = encode(BATCH.slice(0, 1).set_column(index, SAMPLE_SCHEMA.field(index), experts))
    assert len(frame) < MAX_MESSAGE_BYTES


def test_optional_and_missing_values_survive() -> None:
    rows = BATCH.to_pylist()
    rows[1]["ref_logprobs"] = [-1.5] * len(rows[1]["tokens"])
    rows[2]["components"] = [("math", 1.0), ("format", 0.5)]
    table = pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)
    assert decode(encode(table, frame_bytes=500), schema=SAMPLE_SCHEMA).to_pylist() == table.to_pylist()


def test_slices_and_chunks_are_encoded_as_they_are() -> None:
    table = pa.concat_tables([BATCH.slice(7, 3), BATCH.slice(0, 2)])
    assert decode(encode(table), schema=SAMPLE_SCHEMA).equals(table.combine_chunks())
    assert sum(map(len, encode(BATCH.slice(7, 1)))) < len(FRAME)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.sampled_from([1, 5, 3000, 20_000]), min_size=1, max_size=30))
def test_frames_are_bounded_however_uneven_the_rows(lengths: list[int]) -> None:
    """Tests that only a frame of a single row may be longer than asked, by more than Arrow's overhead."""
    values = pa.list_(pa.float32())
    table = pa.table({"x": pa.array([[0.5] * n for n in lengths], values)})
    frames = list(encode(table, frame_bytes=100_000))
    assert decode(frames).equals(table)
    for frame in frames:
        rows = decode([frame]).num_rows
        assert len(frame) <= 100_000 + OVERHEAD_BYTES or rows == 1


def test_frames_are_not_needlessly_small() -> None:
    table = pa.concat_tables([BATCH] * 200).combine_chunks()
    frames = list(encode(table, frame_bytes=100_000))
    # What is too large is halved, so each frame has between half of the size asked and all of it.
    assert len(frames) <= 2 * (table.nbytes // 100_000 + 1)


def test_no_sample_is_refused() -> None:
    for frames in ([], list(encode(BATCH.slice(0, 0)))):
        with raises(InvalidInput, field="frame"):
            decode(frames)


@pytest.mark.parametrize("frame", [b"", b"\x00", b"garbage" * 100, FRAME[:100], FRAME[:-200], b"\xff\xff\xff\xff" * 9])
def test_garbage_is_refused(frame: bytes) -> None:
    with raises(InvalidInput, field="frame"):
        decode([FRAME, frame], schema=SAMPLE_SCHEMA)


@settings(max_examples=1500, deadline=None)
@given(at=st.integers(0, len(FRAME) - 1), bit=st.integers(0, 7))
def test_flipped_bit_is_refused_or_harmless(at: int, bit: int) -> None:
    """Tests that no flipped bit ends the process, as following an offset that points outside its buffer would."""
    frame = bytearray(FRAME)
    frame[at] ^= 1 << bit
    try:
        table = decode([bytes(frame)], schema=SAMPLE_SCHEMA)
    except InvalidInput:
        return
    table.to_pylist()


def test_other_columns_are_refused() -> None:
    other_type = BATCH.set_column(0, "prompt_id", pa.array(range(12)))
    for table in (BATCH.drop_columns(["tokens"]), BATCH.append_column("more", BATCH["group"]), other_type):
        with raises(InvalidInput, field="frame"):
            decode(encode(table), schema=SAMPLE_SCHEMA)
    with raises(InvalidInput, field="frame"):
        decode([*encode(BATCH), *encode(BATCH.drop_columns(["tokens"]))])


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_frame_is_refused_before_it_expands(compression: str) -> None:
    zeros = pa.table({"x": pa.array([[0] * 10_000_000], pa.list_(pa.uint32()))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, zeros.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(zeros)
    frame = sink.getvalue().to_pybytes()
    assert len(frame) < zeros.nbytes / 100
    del zeros
    peak = pa.default_memory_pool().max_memory()
    with raises(InvalidInput, field="frame"):
        decode([FRAME, frame])
    assert pa.default_memory_pool().max_memory() == peak


def test_a_frame_with_dictionaries_is_refused() -> None:
    table = pa.table({"x": pa.array(["a", "b"]).dictionary_encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with raises(InvalidInput, field="frame"):
        decode([sink.getvalue().to_pybytes()])
