"""Tests that a checkpoint is whole and unchanged, or does not exist."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lockstep.types.v1.types_pb2 import ModelCard
from safetensors.torch import load_file

from services.common.errors import DataLoss, InvalidInput, LockstepError, NotFound
from services.trainer.checkpoint import manifest as checkpoint
from services.trainer.checkpoint import model_files
from services.trainer.checkpoint.manifest import TrainState, begin, finish, staging, verify
from tests.support import raises

STATE = TrainState(version=7, last_batch_id="b7", last_metrics={"loss": 0.25}, last_batch_sha256="a" * 64)


def save(path: Path) -> tuple[int, str]:
    partial = begin(path)
    (partial / "state").mkdir()
    (partial / "state" / "a.distcp").write_bytes(b"weights " * 100)
    (partial / "state" / "b.distcp").write_bytes(b"")
    (partial / "c.json").write_text("{}")
    return finish(path, STATE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "step7")
    return tmp_path / "step7"


def test_whole_checkpoint_is_verified(tmp_path: Path) -> None:
    num_bytes, digest = save(tmp_path / "deep" / "step7")
    path = tmp_path / "deep" / "step7"
    assert verify(path) == STATE
    assert num_bytes == 802
    assert digest == hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    assert [file.name for file in path.parent.iterdir()] == ["step7"]


def test_missing_checkpoint_is_not_found(saved: Path, tmp_path: Path) -> None:
    (saved / "manifest.json").unlink()
    (tmp_path / "file").write_text("")
    for path in (saved, tmp_path / "none", tmp_path, tmp_path / "file"):
        with pytest.raises(NotFound):
            verify(path)


def test_missing_and_truncated_files_are_named(saved: Path) -> None:
    data = saved / "state" / "a.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(DataLoss, match=r"state/a\.distcp is not the file"):
        verify(saved)
    data.write_bytes(content + b"\0")
    with pytest.raises(DataLoss, match=r"state/a\.distcp"):
        verify(saved)
    data.unlink()
    with pytest.raises(DataLoss, match=r"state/a\.distcp is missing"):
        verify(saved)
    data.write_bytes(content)
    (saved / "state" / "b.distcp").unlink()  # an empty file is a file
    with pytest.raises(DataLoss, match=r"state/b\.distcp is missing"):
        verify(saved)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(at=st.integers(0, 799), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(saved: Path, at: int, bit: int) -> None:
    data = saved / "state" / "a.distcp"
    content = data.read_bytes()
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    data.write_bytes(changed)
    try:
        with pytest.raises(DataLoss):
            verify(saved)
    finally:
        data.write_bytes(content)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"state": {}, "files": {}}', '{"state": 3, "files": {}}'])
def test_damaged_manifest_is_data_loss(saved: Path, content: str) -> None:
    (saved / "manifest.json").write_text(content)
    with pytest.raises(DataLoss, match=r"manifest\.json"):
        verify(saved)


def test_manifest_cut_short_anywhere_is_data_loss(saved: Path) -> None:
    content = (saved / "manifest.json").read_bytes()
    for size in range(0, len(content) - 1, 7):
        (saved / "manifest.json").write_bytes(content[:size])
        with pytest.raises(DataLoss):
            verify(saved)


def test_existing_path_is_never_overwritten(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (saved, tmp_path / "file"):
        for make in (begin, staging):
            with raises(InvalidInput, field="path"):
                make(path)
    assert verify(saved) == STATE


def test_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(InvalidInput, field="path"):
        begin(tmp_path / "file" / "below")


def test_interrupted_save_leaves_no_checkpoint_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "step7"
    (begin(path) / "half").write_bytes(b"x")
    with pytest.raises(NotFound):
        verify(path)
    save(path)
    assert not (path / "half").exists()
    assert verify(path) == STATE


@pytest.mark.parametrize("fails", ["write_bytes", "rename", "_fsync"])
def test_failure_while_finishing_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "step7"
    partial = begin(path)
    (partial / "a").write_text("a")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint if fails == "_fsync" else Path, fails, full)
        with pytest.raises(OSError, match="no space"):
            finish(path, STATE)
    assert not path.exists()
    with pytest.raises(NotFound):
        verify(path)


def test_manifest_cannot_lead_outside(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["../../etc/passwd"] = {"num_bytes": 1, "sha256": "0"}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LockstepError):
        verify(saved)


CARD = ModelCard(files={"config.json": b'{"model_type": "x"}', "tokenizer.json": b"{}"})


def test_export_is_cut_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_SHARD_BYTES", 100)
    weights = {
        "a": torch.arange(10.0),
        "large": torch.arange(100.0),
        "b": torch.arange(12.0),
        "c": torch.arange(13.0),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    assert model_files.export_hugging_face(weights.items(), CARD, tmp_path) == sum(t.nbytes for t in weights.values())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(weights)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    shards = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert {file.name for file in tmp_path.glob("*.safetensors")} == set(shards)
    for name, tensor in weights.items():
        assert torch.equal(shards[index["weight_map"][name]][name], tensor)
    for shard in shards.values():
        assert sum(t.nbytes for t in shard.values()) <= 100 or len(shard) == 1
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "x", "dtype": "float32"}
    assert (tmp_path / "tokenizer.json").read_bytes() == b"{}"


def test_an_export_says_the_dtype_of_its_weights(tmp_path: Path) -> None:
    for key in ("dtype", "torch_dtype"):
        config = {"model_type": "x", key: "bfloat16", "z": 1}
        card = ModelCard(files={"config.json": json.dumps(config).encode()})
        for dtype in (torch.float32, torch.bfloat16):
            directory = tmp_path / f"{key}-{dtype}"
            directory.mkdir()
            weights = {"a": torch.ones(100, dtype=dtype), "scale": torch.ones(1, dtype=torch.float64)}
            model_files.export_hugging_face(weights.items(), card, directory)
            written = json.loads((directory / "config.json").read_text())
            assert written == config | {key: str(dtype).removeprefix("torch.")}


def test_a_save_clears_what_saves_of_other_steps_left_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step-000004.partial", ".step-000006.partial", ".other.partial", "step-000002"):
        (tmp_path / name).mkdir()
    begin(tmp_path / "elsewhere")
    assert (tmp_path / ".step-000004.partial").is_dir()
    begin(tmp_path / "step-000006")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".elsewhere.partial", ".step-000006.partial", ".other.partial", "step-000002"}


@pytest.mark.parametrize("files", ["null", "3", '["c.json"]', "[" * 100_000, f'{{"{"a" * 5000}": {{}}}}'])
def test_a_manifest_with_anything_in_place_of_files_is_damaged(saved: Path, files: str) -> None:
    manifest = saved / "manifest.json"
    state = json.dumps(json.loads(manifest.read_text())["state"])
    manifest.write_text(f'{{"state": {state}, "files": {files}}}')
    with pytest.raises(DataLoss, match=r"manifest\.json is damaged"):
        verify(saved)
