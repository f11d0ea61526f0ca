"""Parquet files that take more than the available memory are refused before they are read, and no others."""

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import InvalidInput
from services.coordinator.data.reading.sources import read_rows

_ROWS = 20_000
_CHAT = [{"role": "user", "content": "x" * 5000}]


@pytest.mark.parametrize(
    ("column", "num_mib"),
    [
        (["x" * 5000] * _ROWS, 95),
        ([["x" * 5000, None]] * _ROWS, 95),
        ([_CHAT] * _ROWS, 95),
        ([{"a": {"b": ["x" * 5000]}}] * _ROWS, 95),
        (pa.array([[("x" * 5000, "")]] * _ROWS, pa.map_(pa.string(), pa.string())), 95),
        ([1] * (_ROWS * 600), 91),
        ([f"{number:05}" * 1000 for number in range(_ROWS)], 95),  # no text twice: the file's own numbers are enough
    ],
    ids=["text", "list", "messages", "struct", "map", "integers", "different texts"],
)
def test_a_parquet_file_that_unpacks_to_more_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: Any, num_mib: int
) -> None:
    """A file has a text once for all rows that have it, so a few kB may be gigabytes of rows."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": column}), path, compression="zstd")
    memory = "services.coordinator.data.reading.parquet.usable_memory"
    # Of the size in memory, offsets and bits that say what is null are some percent.
    monkeypatch.setattr(memory, lambda: (8.0, 1.05 * num_mib / 1024))
    assert len(read_rows(path, field="data.train")) == len(column)
    monkeypatch.setattr(memory, lambda: (8.0, 0.95 * num_mib / 1024))
    with pytest.raises(InvalidInput, match=r"data\.train: .*x\.parquet takes over 0\.1 GiB .* 0\.1 GiB of memory are"):
        read_rows(path, field="data.train")


# What Rust's and Java's writers make of the texts x1 to x4: a dictionary until it is full, and then pages of deltas.
_DICTIONARY_AND_DELTAS = """
UEFSMRUEFQwVDEwVAhUAEgAAAgAAAHgxFQYVCBUIXBUCFQAVAhUQFQQVABIAAAIBAAIVBhVEFURcFQYVABUGFQ4VBBUAEgAABgGAAQQDAAABAA
AAAQAAAIABBAMEAQEAAAACAAAAeDIzNBkiAgIZKAJ4MQJ4MhkoAngxAng0FQIZJgAAKUYAAgAGABksFjAVNBYAABZkFXAWAgAZJgQMABUEGSxI
DGFycm93X3NjaGVtYRUCABUMJQIYAWElAEwcAAAAFggZHBkcJgAcFQwZRQAGDhAZGAFhFQAWCBbMARbMASYwJggcNgAoAng0GAJ4MRERABk8FQ
YVEBUCABUEFQAVAgAVBhUOFQIAPBYQKSYACAAAFpYCFSoW1AEVQgAWzAEWCCYIFswBFAAAKBlwYXJxdWV0LXJzIHZlcnNpb24gNTkuMC4wGRwc
AAAArQAAAFBBUjE=
"""


def test_parquet_files_of_which_pyarrow_reads_no_dictionary_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(base64.b64decode(_DICTIONARY_AND_DELTAS))
    assert {"RLE_DICTIONARY", "DELTA_BYTE_ARRAY"} < {*pq.ParquetFile(path).metadata.row_group(0).column(0).encodings}
    assert [dict(row) for _, row in read_rows(path, field="data.train")] == [{"a": f"x{one}"} for one in (1, 2, 3, 4)]


def test_categories_of_a_parquet_file_take_the_memory_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": pa.array(["x" * 5000] * _ROWS).dictionary_encode()}), path)
    monkeypatch.setattr("services.coordinator.data.reading.parquet.usable_memory", lambda: (8.0, 2**-10))
    assert len(read_rows(path, field="data.train")) == _ROWS
