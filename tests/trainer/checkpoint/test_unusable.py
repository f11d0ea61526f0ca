"""Tests that a checkpoint of another model, or one that cannot be read, is a typed error, and the trainer goes on."""

import json
from pathlib import Path

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.errors import InternalError, PreconditionFailed
from services.trainer.checkpoint.manifest import begin
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
