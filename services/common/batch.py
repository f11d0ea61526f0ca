"""Samples as Arrow: one schema in memory, on the wire and in the Parquet file that a run keeps of every step."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from services.common.errors import InvalidInput

# Tokens in, tokens out: text is derived data and is never tokenised again.
SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.list_(pa.uint32()), nullable=False),
        pa.field("tokens", pa.list_(pa.uint32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("components", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("baseline", pa.float64()),  # reward of the greedy completion of the prompt, where one is drawn
        # One for each of tokens; missing columns are null in every row. A false loss_mask is not trained on.
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("ref_logprobs", pa.list_(pa.float32())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("returns", pa.list_(pa.float32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("policy_version", pa.uint64(), nullable=False),
        pa.field("policy_digest", pa.string(), nullable=False),
        pa.field("scorer", pa.string(), nullable=False),
        pa.field("seed", pa.uint64(), nullable=False),
    ]
)

# Larger gRPC messages block the event loop, smaller ones pay more for each.
FRAME_BYTES = 1 << 20


def encode(table: pa.Table, *, frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Cuts `table` into self-contained Arrow IPC streams of up to about `frame_bytes`; a longer row has its own."""
    schema = table.schema.serialize()
    # Rows that fill three quarters of a frame if all are alike; few are then so uneven that they must be cut again.
    rows = max(1, table.num_rows * frame_bytes * 3 // (4 * max(1, table.nbytes)))
    for part in table.combine_chunks().to_batches(max_chunksize=rows):
        for batch in _halve(part, frame_bytes):
            yield b"".join((schema, batch.serialize()))


def _halve(batch: pa.RecordBatch, num_bytes: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= 1 or batch.nbytes <= num_bytes:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _halve(batch.slice(0, middle), num_bytes)
    yield from _halve(batch.slice(middle), num_bytes)


def decode(frames: Iterable[bytes], *, schema: pa.Schema | None = None) -> pa.Table:
    """The table of `frames`, without copying them.

    Raises:
        InvalidInput: A frame is not an Arrow stream, there is none, or the columns are not those of `schema`.
    """
    try:
        tables = [pa.ipc.open_stream(pa.py_buffer(frame)).read_all() for frame in frames]
        table = pa.concat_tables(tables) if tables else None
        if table is not None:
            table.validate(full=True)  # an offset outside its buffer would otherwise be followed
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"frame: not an Arrow stream of samples: {error}", field="frame") from error
    if table is None or table.num_rows == 0:
        raise InvalidInput("frame: the batch holds no sample", field="frame")
    if schema is not None and not table.schema.equals(schema):
        raise InvalidInput(f"frame: columns are {table.schema.names}, expected {schema.names}", field="frame")
    return table
