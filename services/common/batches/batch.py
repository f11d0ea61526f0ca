"""Encodes samples as Arrow: the same schema in memory, on the wire and in the Parquet file kept for every step."""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from services.common.errors import InvalidInput

CALL = pa.struct([pa.field("number", pa.int32()), pa.field("parent", pa.int32()), pa.field("sha256", pa.string())])
# Samples are tokens everywhere. Text is derived from tokens and is never tokenized again.
SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        # A sample of an agent has a row for each of its segments, which are neighbors; null otherwise.
        pa.field("segment", pa.int32()),
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
        pa.field("teacher_logprobs", pa.list_(pa.float32())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("returns", pa.list_(pa.float32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("policy_version", pa.uint64(), nullable=False),
        pa.field("policy_digest", pa.string(), nullable=False),
        pa.field("scorer", pa.string(), nullable=False),
        pa.field("seed", pa.uint64(), nullable=False),
        # Only samples of an environment have these; they are null otherwise. Turn k has the tokens from turn_begins[k]
        # to turn_ends[k].
        pa.field("turn_begins", pa.list_(pa.int32())),
        pa.field("turn_ends", pa.list_(pa.int32())),
        pa.field("turn_rewards", pa.list_(pa.float64())),
        pa.field("environment", pa.string()),
        # Only samples of an agent have these: for each turn the number of its call, that of the call that it continues
        # (null in the first turn of a segment), and the SHA-256 of the request's body.
        pa.field("calls", pa.list_(CALL)),
        # The experts that the engine chose for each token but the last (routed_experts.py); null if it returned none.
        pa.field("routed_experts", pa.large_binary()),
        # The tokens that each token was drawn from (encode_sampling_masks); null if sampling was not truncated.
        pa.field("sampling_mask", pa.large_binary()),
        # The tokens that the teacher finds most probable at each (encode_top_k); null without trainer.loss.distill.
        pa.field("teacher_top_k", pa.large_binary()),
    ]
)


def is_of_samples(schema: pa.Schema) -> bool:
    """Returns whether a table has all columns that samples must have. Those of earlier releases lack newer ones."""
    places = {field: schema.get_field_index(field.name) for field in SAMPLE_SCHEMA if not field.nullable}
    return all(place >= 0 and schema.field(place).equals(field) for field, place in places.items())


# Larger gRPC messages block the event loop; smaller ones cost more overhead per byte.
FRAME_BYTES = 1 << 20


def without(samples: pa.Table, *names: str) -> pa.Table:
    """Returns `samples` with null in every row of the columns `names`."""
    for name in names:
        index = samples.schema.get_field_index(name)
        field = samples.schema.field(index)
        samples = samples.set_column(index, field, pa.nulls(samples.num_rows, field.type))
    return samples


def encode(table: pa.Table, *, frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Splits `table` into self-contained Arrow IPC streams of about `frame_bytes` at most.

    A row that is larger than that gets a stream of its own.
    """
    schema = table.schema.serialize()
    # Parts have this many rows. At the average size, they fill 3/4 of a frame, so that few parts must be split again.
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
    """Returns the table encoded in `frames`, without copying them."""
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


def tokens_sha256(tokens: Sequence[int]) -> str:
    """Returns the SHA-256 of `tokens`, each as a little-endian uint32, as 64 lowercase hexadecimal digits."""
    return hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).hexdigest()


_TYPE = np.dtype("<u4")


def encode_sampling_masks(sets: Sequence[np.ndarray | Sequence[int]]) -> bytes:
    """Returns the bytes of the sampling mask of each token."""
    counts = np.array(list(map(len, sets)), _TYPE)
    return b"".join((counts.tobytes(), *(np.asarray(allowed).astype(_TYPE).tobytes() for allowed in sets)))


def decode_sampling_masks(data: bytes | memoryview, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the size of each token's set, int64 [num_tokens], and the tokens of all sets, uint32.

    Raises:
        ValueError: These are not the sampling masks of `num_tokens` tokens.
    """
    if len(data) % _TYPE.itemsize:
        raise ValueError(f"{len(data)} bytes are not whole numbers")
    numbers = np.frombuffer(data, _TYPE)
    counts, allowed = numbers[:num_tokens].astype(np.int64), numbers[num_tokens:]
    if len(counts) != num_tokens or counts.sum() != len(allowed):
        raise ValueError(f"{len(numbers)} numbers are not the sampling masks of {num_tokens} tokens")
    return counts, allowed


def allows_sampled(tokens: np.ndarray, counts: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Returns whether each of `tokens` is in its own set, bool [tokens]; for the results of `decode_sampling_masks`."""
    own = np.repeat(np.arange(len(tokens)), counts)  # of each allowed token, the index of the token it is a choice for
    is_allowed = np.zeros(len(tokens), bool)
    is_allowed[own[allowed == tokens[own]]] = True
    return is_allowed


def join_sampling_masks(parts: Iterable[tuple[bytes, int]]) -> bytes:
    """Returns the sampling masks of a completion from those of its parts, each with its number of tokens.

    The tokens of a part without sampling masks, which is empty bytes, have the count 0.
    """
    counts: list[bytes] = []
    allowed: list[bytes] = []
    for data, num_tokens in parts:
        size = num_tokens * _TYPE.itemsize
        counts.append(data[:size] or bytes(size))
        allowed.append(data[size:])
    return b"".join((*counts, *allowed))


NO_TOKEN = -1
"""The number in place of a token, where fewer than k tokens can be sampled. Its log-probability is 0."""


def encode_top_k(tokens_TK: np.ndarray, logprobs_TK: np.ndarray) -> bytes:
    """Returns the bytes of k tokens at each of T places, the most probable to a teacher, with k + 1 log-probabilities.

    The last of these is of all other tokens.
    """
    return tokens_TK.astype("<i4").tobytes() + logprobs_TK.astype("<f4").tobytes()


def decode_top_k(data: bytes | memoryview, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens, int32 [num_tokens, k], and the log-probabilities, float32 [num_tokens, k + 1].

    Raises:
        ValueError: These are not the same number of tokens for each of `num_tokens` places.
    """
    k, rest = divmod(len(data) - 4 * num_tokens, 8 * num_tokens)  # 8 k + 4 bytes a token
    if rest or k < 1:
        raise ValueError(
            f"{len(data)} bytes are not k tokens and k + 1 log-probabilities at each of {num_tokens} places"
        )
    tokens = np.frombuffer(data, "<i4", num_tokens * k).reshape(num_tokens, k)
    return tokens, np.frombuffer(data, "<f4", num_tokens * (k + 1), tokens.nbytes).reshape(num_tokens, k + 1)
