"""Tests that missing and damaged weights are found from the headers of safetensors files."""

import json
import os
from pathlib import Path

import pytest

from services.common.errors import InvalidInput
from services.common.model_card import INDEX, WHOLE, Stored, whole_weights


def write(file: Path, header: object, num_bytes: int) -> None:
    content = json.dumps(header).encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(num_bytes))


HEADER = {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def test_whole_weights_are_accepted(tmp_path: Path) -> None:
    write(tmp_path / WHOLE, HEADER, 16)
    assert whole_weights(tmp_path) == {"w": Stored(tmp_path / WHOLE, "F32", (2, 2))}
    (tmp_path / WHOLE).rename(tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert whole_weights(tmp_path) == {"w": Stored(tmp_path / "a.safetensors", "F32", (2, 2))}


@pytest.mark.parametrize(
    ("num_bytes", "header", "problem"),
    [
        (15, HEADER, "bytes, and its header describes"),
        (17, HEADER, "bytes, and its header describes"),
        (16, [], "its header cannot be read"),
        (16, {"w": {"dtype": "F32"}}, "its header cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, num_bytes: int, header: object, problem: str) -> None:
    write(tmp_path / WHOLE, header, num_bytes)
    with pytest.raises(InvalidInput, match=f"{WHOLE} is not a whole safetensors file: .*{problem}"):
        whole_weights(tmp_path)


@pytest.mark.parametrize(("size", "problem"), [(0, "it is empty"), (5, "cut off"), (20, "cut off")])
def test_a_file_that_is_cut_in_its_header_is_refused(tmp_path: Path, size: int, problem: str) -> None:
    write(tmp_path / WHOLE, HEADER, 16)
    os.truncate(tmp_path / WHOLE, size)
    with pytest.raises(InvalidInput, match=problem):
        whole_weights(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"has no {WHOLE}"):
        whole_weights(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    with pytest.raises(InvalidInput, match=r"a\.safetensors does not exist"):
        whole_weights(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write(tmp_path / name, HEADER, 16)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    with pytest.raises(InvalidInput, match=r"w is in two files, .*a\.safetensors and b\.safetensors"):
        whole_weights(tmp_path)


def test_an_index_that_names_another_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", HEADER, 16)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"v": "a.safetensors"}}))
    with pytest.raises(InvalidInput, match=rf"{INDEX}: v is not in a\.safetensors"):
        whole_weights(tmp_path)
