"""Encodes samples as Arrow: the same schema in memory, on the wire and in the Parquet file kept for every step.

On the wire a table is a stream of messages: a header if the call has one, frames, and last the SHA-256 of all of it. A
stream that was cut short or changed on the way is therefore refused, also where the connection is plaintext.
"""

import hashlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar

import pyarrow as pa
from google.protobuf.message import Message

from services.common.errors import DataLoss, InvalidInput, Reason

Sent = TypeVar("Sent")

# Samples are tokens everywhere. Text is derived from tokens and is never tokenized again.
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
        pa.field("baseline", pa.float64()),  # reward of the prompt's greedy completion, if one was generated
        # The lists below have one element per token. A missing column is null in every row. Tokens whose loss_mask is
        # false are not trained on.
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

# Larger gRPC messages block the event loop; smaller ones cost more overhead per byte.
FRAME_BYTES = 1 << 20


def encode(table: pa.Table, *, frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Splits `table` into self-contained Arrow IPC streams of about `frame_bytes` at most.

    A row that is larger than that gets a stream of its own.
    """
    schema = table.schema.serialize()
    # This many rows of average size fill 3/4 of a frame, so that few parts are so uneven that they are split again.
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
    """Returns the table encoded in `frames`, without copying them.

    Raises:
        InvalidInput: A frame is not an Arrow stream or is compressed, there are no samples, or the columns are not
            those of `schema`.
    """
    try:
        tables = [_read(pa.py_buffer(frame)) for frame in frames]
        table = pa.concat_tables(tables) if tables else None
        if table is not None:
            table.validate(full=True)  # otherwise an offset outside its buffer would be followed
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"frame: not an Arrow stream of samples: {error}", field="frame") from error
    if table is None or table.num_rows == 0:
        raise InvalidInput("frame: the batch has no samples", field="frame")
    if schema is not None and not table.schema.equals(schema):
        raise InvalidInput(f"frame: columns are {table.schema.names}, expected {schema.names}", field="frame")
    return table


async def to_messages(
    kind: Callable[..., Sent], frames: Iterable[bytes], header: Message | None = None
) -> AsyncGenerator[Sent, None]:
    """Yields messages of `kind`: the header, if there is one, then the frames, then the SHA-256."""
    sha256 = _Sha256()
    if header is not None:
        sha256.add(header.SerializeToString(deterministic=True))
        yield kind(header=header)
    for frame in frames:
        sha256.add(frame)
        yield kind(frame=frame)
    yield kind(sha256=sha256.digest)


async def from_messages(messages: AsyncIterator[Any], *, has_header: bool) -> tuple[Any, list[bytes]]:
    """Returns header and frames of a stream that `to_messages` made; the header is None if the stream has none.

    Raises:
        InvalidInput: The header is missing, not first, or sent twice.
        DataLoss: CORRUPT_TRANSFER, because what arrived is not what was sent.
    """
    header, frames, sha256, expected = None, [], _Sha256(), b""
    async for message in messages:
        part = message.WhichOneof("part")
        if has_header and (part == "header") != (header is None):
            raise InvalidInput("header: must be the first message and be sent once", field="header")
        if part == "header":
            header = message.header
            sha256.add(header.SerializeToString(deterministic=True))
        elif part == "sha256":
            expected = message.sha256
        else:
            frames.append(message.frame)
            sha256.add(message.frame)
    if has_header and header is None:
        raise InvalidInput("header: must be the first message", field="header")
    if expected != sha256.digest:
        why = "its bytes changed on the way" if expected else "it ended before its SHA-256"
        raise DataLoss(f"a batch of {len(frames)} frames did not arrive as sent: {why}", reason=Reason.CORRUPT_TRANSFER)
    return header, frames


class _Sha256:
    """Hashes parts, each preceded by its length in 8 bytes, so that their boundaries count too."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, part: bytes) -> None:
        self._hash.update(len(part).to_bytes(8, "big"))
        self._hash.update(part)

    @property
    def digest(self) -> bytes:
        return self._hash.digest()


def _read(frame: pa.Buffer) -> pa.Table:
    """Reads a frame without copying it. Raises ArrowInvalid if it is compressed: 16 kB of zstd expand to 400 MB."""
    for message in pa.ipc.MessageReader.open_stream(frame):
        if message.type not in ("schema", "record batch"):
            raise pa.ArrowInvalid(f"it has a {message.type}")
        if message.type == "record batch" and _is_compressed(message.metadata.to_pybytes()):
            raise pa.ArrowInvalid("it is compressed; send it without compression")
    return pa.ipc.open_stream(frame).read_all()


def _is_compressed(metadata: bytes) -> bool:
    """Returns whether a record batch has a compressed body.

    pyarrow does not show this, so it is read from the flatbuffer, which Arrow has verified: arrow/format/Message.fbs
    has `header` as field 2 of Message, and `compression` as field 3 of RecordBatch.
    """
    message = struct.unpack_from("<I", metadata)[0]
    header = _field(metadata, message, 2)
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _field(metadata, batch, 3) != 0


def _field(flatbuffer: bytes, table: int, number: int) -> int:
    """Returns the position of a field of the table at `table`, or 0 if it is not set."""
    vtable = table - struct.unpack_from("<i", flatbuffer, table)[0]
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", flatbuffer, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", flatbuffer, vtable + at)[0]
    return table + offset if offset else 0
