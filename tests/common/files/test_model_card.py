"""Tests that a model card has small files only, and never code."""

import json
import os
from pathlib import Path

import pytest
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput, NotFound
from services.common.model_card import card_texts, model_digests, read_model_card, vocab_size_of, write_model_card
from tests.support import raises


def directory_with(path: Path, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def test_card_holds_the_small_files_and_nothing_else(tmp_path: Path) -> None:
    source = directory_with(
        tmp_path / "in",
        config__json='{"a": 1}',
        tokenizer__json="{}",
        chat_template__jinja="{{ x }}",
        model__safetensors="weights",
        modeling_evil__py="import os",
    )
    card = read_model_card(source)
    assert set(card.files) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    target = directory_with(tmp_path / "out")
    write_model_card(card, target)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == dict(card.files)


def test_a_vocabulary_that_is_no_text_is_in_the_card_only_without_tokenizer_json(tmp_path: Path) -> None:
    source, target = directory_with(tmp_path / "in", config__json="{}"), directory_with(tmp_path / "out")
    (source / "tokenizer.model").write_bytes(b"\xff\x00")
    card = read_model_card(source)
    assert card.files["tokenizer.model"] == b"\xff\x00"
    write_model_card(card, target)
    assert (target / "tokenizer.model").read_bytes() == b"\xff\x00"
    with raises(InvalidInput, field="model_card"):
        card_texts(card)
    assert "tokenizer.model" not in read_model_card(directory_with(source, tokenizer__json="{}")).files


@pytest.mark.parametrize(
    ("content", "vocab_size"),
    [
        ({"model_type": "qwen3", "vocab_size": 64}, 64),
        ({"model_type": "gemma3", "text_config": {"vocab_size": 64}}, 64),
        # As in gemma-3-4b-it: transformers' default.
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}, 262208),
    ],
)
def test_size_of_the_vocabulary(content: dict[str, object], vocab_size: int) -> None:
    assert vocab_size_of(json.dumps(content).encode()) == vocab_size


def test_numbers_that_are_not_finite_are_read_as_transformers_writes_them() -> None:
    content = {"model_type": "falcon_h1", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    card = ModelCard(files={"config.json": json.dumps(content).encode()})
    by_default = ModelCard(files={"config.json": b'{"model_type": "falcon_h1"}'})
    assert model_digests(card) == model_digests(by_default)


def test_missing_model_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "none", directory_with(tmp_path / "empty"), Path("org/name-on-a-hub")):
        with raises(NotFound, field="model"):
            read_model_card(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [json.dumps({"auto_map": {"AutoConfig": "evil.Config"}}), "no json", "[]", "3"])
def test_code_and_nonsense_are_refused_on_both_ends(tmp_path: Path, name: str, content: str) -> None:
    source = directory_with(tmp_path / "in", config__json="{}")
    (source / name).write_text(content)
    with raises(InvalidInput, field="model"):
        read_model_card(source)
    card = ModelCard(files={"config.json": b"{}", name: content.encode()})
    with raises(InvalidInput, field="model"):
        write_model_card(card, directory_with(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "special_tokens_map.json", "vocab.json"])
@pytest.mark.parametrize("content", ["no json", "[]", "[" * 100_000])
def test_other_files_are_json_objects(tmp_path: Path, name: str, content: str) -> None:
    source = directory_with(tmp_path / "in", config__json="{}")
    (source / name).write_text(content)
    with raises(InvalidInput, field="model"):
        read_model_card(source)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link to nothing", "link outside", "link up and outside"])
def test_only_files_of_the_model_are_read(tmp_path: Path, name: str, kind: str) -> None:
    """A FIFO would make the reader wait, and the content of a linked file would leave this host in the card."""
    source, file = directory_with(tmp_path / "in", config__json="{}"), tmp_path / "in" / name
    file.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("{}")
    {
        "fifo": lambda: os.mkfifo(file),
        "directory": file.mkdir,
        "link to nothing": lambda: file.symlink_to("nothing"),
        "link outside": lambda: file.symlink_to(tmp_path / "secret"),
        "link up and outside": lambda: file.symlink_to("../secret"),
    }[kind]()
    with raises(InvalidInput, field="model"):
        read_model_card(source)


def test_snapshot_in_the_hubs_cache_is_a_model(tmp_path: Path) -> None:
    """The files of a snapshot link to `../../blobs`. A link to the whole directory is followed, too."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "abc").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (tmp_path / "model").symlink_to(snapshot)
    for directory in (snapshot, tmp_path / "model"):
        assert dict(read_model_card(directory).files) == {"config.json": b'{"a": 1}'}


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    source = directory_with(tmp_path / "in", config__json="{}")
    (source / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with raises(InvalidInput, field="model"):
        read_model_card(source)


@pytest.mark.parametrize(
    "name", ["../escape", "/etc/passwd", "sub/config.json", "modeling_evil.py", "config.json/..", "", "."]
)
def test_file_that_no_card_has_is_refused(tmp_path: Path, name: str) -> None:
    target = directory_with(tmp_path / "out")
    card = ModelCard(files={"config.json": b"{}", "tokenizer.json": b"{}", name: b"x"})
    with raises(InvalidInput, field="model_card"):
        write_model_card(card, target)
    assert not list(target.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_elsewhere_does_not_get_into_a_card(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    model = directory_with(tmp_path / "model", config__json="{}", real__json="{}")
    (model / "generation_config.json").symlink_to(tmp_path / "secret")
    with raises(InvalidInput, field="model"):
        read_model_card(model)
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").symlink_to("real.json")
    assert set(read_model_card(model).files) == {"config.json", "generation_config.json"}
