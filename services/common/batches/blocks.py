"""Cuts a batch into blocks of prompt groups, counts their tokens, and hashes blocks by their content.

A block's hash is over its values and not over the bytes of a message, so that the samples that a trainer received early
can be compared with those that the coordinator recorded later.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import Message


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
