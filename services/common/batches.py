"""Encodes samples as Arrow: the same schema in memory, on the wire and in the Parquet file kept for every step.

A batch is cut into blocks of prompt groups. A block's hash is over its values and not over the bytes of a message, so
that the samples that a trainer received early can be compared with those that the coordinator recorded later.
"""

import hashlib
import json
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import Message

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


def begins_of_groups(samples: pa.Table) -> np.ndarray:
    """Returns the first row of each group, int64 [groups]. The samples of a group must be neighbors."""
    group = samples["group"].to_numpy()
    return np.flatnonzero(np.diff(group, prepend=group[0] - 1))


def begins_of_samples(samples: pa.Table) -> np.ndarray:
    """Returns the first row of each sample, int64 [samples]. A sample of an agent has several, which are neighbors."""
    if "segment" not in samples.column_names or not samples["segment"].is_valid().to_numpy().any():
        return np.arange(len(samples))
    keys = [samples[name].to_numpy() for name in ("group", "sample")]
    is_first = sum(np.diff(key, prepend=key[0] - 1) != 0 for key in keys)
    return np.flatnonzero(np.asarray(is_first))


def packed_lengths(samples: pa.Table) -> np.ndarray:
    """Returns the number of tokens that each sample has in a micro-batch, with its prompt, int64 [samples]."""
    lengths = pc.add(pc.list_value_length(samples["prompt_tokens"]), pc.list_value_length(samples["tokens"]))
    return lengths.to_numpy().astype(np.int64) - 1  # the last token is predicted, and predicts none


def tokens_of_groups(samples: pa.Table) -> list[int]:
    """Returns the number of tokens of each group, of which the samples are neighbors, in micro-batches."""
    return np.add.reduceat(packed_lengths(samples), begins_of_groups(samples)).tolist()


class BlockCutter:
    """Cuts a batch into blocks, group by group, in the order of the batch.

    A block ends with the first group with which it has at least `least_tokens` tokens, or with its mini-batch. With
    `growth`, the first blocks are smaller, so that the first is complete early: each needs `growth` tokens more than
    the one before, up to `tokens_per_block`.
    """

    def __init__(self, tokens_per_block: int, groups_per_minibatch: int = 0, growth: int = 0):
        """Begins a batch, of a single mini-batch if `groups_per_minibatch` is 0."""
        self._tokens_per_block, self._groups_per_minibatch = tokens_per_block, groups_per_minibatch or sys.maxsize
        self._growth, self._num_groups, self._num_tokens = growth, 0, 0
        self.least_tokens = (tokens_per_block % growth or growth) if growth else tokens_per_block
        """Tokens with which the block that the next group is in will end."""

    @property
    def continues(self) -> bool:
        """Whether the next group continues a block."""
        return self._num_tokens > 0

    def ends_with(self, num_tokens: int) -> bool:
        """Returns whether a block ends with the next group, which has `num_tokens` tokens."""
        self._num_groups += 1
        self._num_tokens += num_tokens
        ends = self._num_tokens >= self.least_tokens or self._num_groups % self._groups_per_minibatch == 0
        if ends:
            self._num_tokens = 0
            self.least_tokens = min(self.least_tokens + self._growth, self._tokens_per_block)
        return ends


def blocks_of(samples: pa.Table, cutter: BlockCutter) -> list[pa.Table]:
    """Cuts `samples`, in which the samples of a group are neighbors, where `cutter` says."""
    begins: list[int] = []
    for begin, num_tokens in zip(begins_of_groups(samples), tokens_of_groups(samples), strict=True):
        if not cutter.continues:
            begins.append(begin)
        cutter.ends_with(num_tokens)
    return [
        samples.slice(begin, end - begin) for begin, end in zip(begins, [*begins[1:], samples.num_rows], strict=True)
    ]


def trained_tokens(samples: pa.Table) -> np.ndarray:
    """Returns the number of completion tokens of each sample that loss_mask does not mask, int64 [samples]."""
    if samples["loss_mask"].null_count:
        return pc.list_value_length(samples["tokens"]).to_numpy().astype(np.int64)
    return np.array([np.count_nonzero(mask.values) for mask in samples["loss_mask"]], np.int64)


def content_sha256(block: pa.Table) -> bytes:
    """Returns the SHA-256 of all values of `block`, however they are laid out in memory."""
    sha256 = hashlib.sha256()
    for name, column in zip(block.schema.names, block.columns, strict=True):
        for part in (name.encode(), *_bytes_of(column)):
            sha256.update(len(part).to_bytes(8, "big"))
            sha256.update(part)
    return sha256.digest()


def batch_sha256(header: Message, blocks: Iterable[bytes]) -> bytes:
    """Returns the SHA-256 of a batch: of its header and of the hashes of its blocks, in order."""
    sha256 = hashlib.sha256(hashlib.sha256(header.SerializeToString(deterministic=True)).digest())
    for block in blocks:
        sha256.update(block)
    return sha256.digest()


def _bytes_of(column: pa.ChunkedArray) -> Sequence[bytes | pa.Buffer]:
    if pa.types.is_large_binary(column.type):
        # The lengths too, or bytes could move from one row to the next without changing the hash.
        lengths = pc.fill_null(pc.binary_length(column), -1)
        return [lengths.to_numpy().tobytes(), *(row.as_buffer() for row in column.drop_null())]
    if pa.types.is_primitive(column.type) and not column.null_count:
        return [column.to_numpy().tobytes()]
    if not pa.types.is_list(column.type):
        return [json.dumps(column.to_pylist()).encode()]
    values = pc.list_flatten(column)
    if values.null_count or pa.types.is_struct(values.type):
        return [json.dumps(column.to_pylist()).encode()]
    lengths = pc.fill_null(pc.list_value_length(column), -1)
    return [lengths.to_numpy().tobytes(), values.to_numpy().tobytes()]
