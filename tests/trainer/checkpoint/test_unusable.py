"""Tests that a checkpoint of another model, or one that cannot be read, is a typed error, and the trainer goes on."""

import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.errors import DataLoss, InternalError, PreconditionFailed
from services.trainer.checkpoint.manifest import begin
from services.trainer.compat.torch_checkpoint import read_metadata
from tests import support
from tests.trainer.deployment import Deployment
from tests.trainer.fsdp_harness import Harness


async def test_other_shapes_are_refused_and_the_trainer_opens_again(
    trainer: Deployment, trainer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(tmp_path / "c")))
    monkeypatch.setitem(support._SHAPE, "intermediate_size", 256)
    support.make_model(trainer_files / "models" / "wide", "untied")
    with pytest.raises(PreconditionFailed, match=r"saved with another config\.json of the model"):
        await trainer.open("wide", checkpoint=str(tmp_path / "c"))
    manifest = tmp_path / "c" / "manifest.json"  # of a checkpoint that does not say with which files it was saved
    content = json.loads(manifest.read_text())
    state = content["state"]
    state["made_with"] = {key: value for key, value in state["made_with"].items() if not key.startswith("model/")}
    manifest.write_text(json.dumps(content))
    with pytest.raises(PreconditionFailed) as caught:
        await trainer.open("wide", checkpoint=str(tmp_path / "c"))
    assert (
        "model.causal_lm.model.layers.0.mlp.down_proj.weight is [64, 128] there and [64, 256] here"
        in caught.value.message
    )
    await trainer.open("untied", checkpoint=str(tmp_path / "c"))
    assert await trainer.publish() == trainer.stamp
    # With tied embeddings, the model's names and shapes are the same, but the optimizer's are not.
    with pytest.raises(PreconditionFailed, match=r"state\.causal_lm\.lm_head\.weight\.exp_avg is \[64, 64\] there"):
        await trainer.open("tied", checkpoint=str(tmp_path / "c"))
    await trainer.open("tied")


def test_a_file_that_cannot_be_read_is_a_typed_error(harness: Harness, tmp_path: Path) -> None:
    """Tests a file that is damaged after the checkpoint was verified: torch's error is then no `Exception`."""
    harness.open("untied", {})
    directory = begin(tmp_path / "c") / "state"
    harness.backend.save(directory)
    data = max(directory.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1000])
    with pytest.raises(InternalError, match=rf"checkpoint {directory}: not read: rank 0: "):
        harness.backend.load(directory)
    data.unlink()
    with pytest.raises(InternalError, match="not read: rank 0: FileNotFoundError"):
        harness.backend.load(directory)


class _Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.open("untied", {})
    directory, ran = begin(tmp_path / "c") / "state", tmp_path / "ran"
    harness.backend.save(directory)
    file = directory / ".metadata"
    honest = file.read_bytes()
    for content, why in (
        (pickle.dumps(_Hostile(ran)), r"it names posix\.mkdir"),
        (honest[:-20], "is not the metadata of a checkpoint"),
        (pickle.dumps(7), "it holds something else"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataLoss, match=why):
            read_metadata(directory)
        with pytest.raises(DataLoss, match=why):
            harness.backend.load(directory)
    # What torch's reader fails on; torch then reads the metadata that a rank has written alone.
    metadata = pickle.loads(honest)
    metadata.storage_meta = (1,)
    file.write_bytes(pickle.dumps(metadata))
    (directory / "__0.metadata").write_bytes(pickle.dumps(_Hostile(ran)))
    harness.backend.load(directory)
    assert not ran.exists()
    file.write_bytes(honest)
    harness.backend.load(directory)
    value = io.BytesIO()
    torch.save(_Hostile(ran), value)
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **options: load(io.BytesIO(value.getvalue()), **options))
    with pytest.raises(InternalError, match=r"not read: .*posix\.mkdir"):
        harness.backend.load(directory)
    assert not ran.exists()
