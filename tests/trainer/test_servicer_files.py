"""Tests checkpoints and exports of a real trainer of two ranks over gRPC: they hold what was trained or are refused."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp

from services.common.errors import DataLoss, InvalidInput, NotFound, PreconditionFailed, Reason
from services.trainer.checkpoint import manifest as checkpoint
from tests.small_disk import small_disk
from tests.support import raises
from tests.trainer.deployment import Deployment
from tests.trainer.harness_processes import marked


async def test_checkpoint_restores_version_batch_and_weights(trainer: Deployment, tmp_path: Path) -> None:
    version_0 = trainer.stamp
    await trainer.train(trainer.batch(), batch_id="first")
    stamp = await trainer.publish()
    saved = await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(tmp_path / "c")))
    assert len(saved.manifest_digest) == 64
    await trainer.train(trainer.batch(seed=1), batch_id="second")
    next_stamp = await trainer.publish()
    opened = await trainer.open(checkpoint=str(tmp_path / "c"))
    assert (opened.version, opened.last_batch_id) == (1, "first")
    assert await trainer.current_stamp() == PolicyStamp(version=1)  # not published by this process since
    assert await trainer.publish() == stamp
    # A resumed batch that was applied before is answered from the checkpoint.
    assert (await trainer.train(trainer.batch(version_0), batch_id="first", stamp=version_0)).replayed
    # The next update is the same, optimizer state included.
    await trainer.train(trainer.batch(seed=1), batch_id="second")
    assert await trainer.publish() == next_stamp


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        ({"rank": 2, "alpha": 8.0}, "lora.alpha"),
        pytest.param({"rank": 4, "alpha": 4.0}, "lora.rank", marks=pytest.mark.long),
        ({}, "lora.rank"),
    ],
)
async def test_adapters_are_loaded_only_as_they_were_saved(
    deployment: Deployment, tmp_path: Path, lora: dict[str, float], field: str
) -> None:
    own = {"rank": 2, "alpha": 4.0}
    await deployment.open(lora=own)
    await deployment.publish()
    await deployment.train(deployment.batch(), batch_id="first")
    stamp, path = await deployment.publish(), tmp_path / "c"
    await deployment.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(path)))
    with raises(PreconditionFailed, field=field):
        await deployment.open(checkpoint=str(path), lora=lora)
    assert await deployment.publish() == stamp  # the open run goes on
    with raises(PreconditionFailed, field="model"):  # adapters of another base are another model
        await deployment.open("tied", checkpoint=str(path), lora=own)
    await deployment.open(checkpoint=str(path), lora=own)
    assert await deployment.publish() == stamp


async def test_a_checkpoint_goes_on_only_with_the_config_and_the_vocabulary_of_its_model(
    trainer: Deployment, tmp_path: Path
) -> None:
    path, other = tmp_path / "c", shutil.copytree(trainer.models / "untied", tmp_path / "other")
    await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(path)))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"transformers_version": "4.0"}))
    await trainer.open(str(other), checkpoint=str(path))
    for name, content in (("config.json", json.dumps(config | {"rms_norm_eps": 0.1})), ("tokenizer.json", "{}")):
        before = (other / name).read_bytes()
        (other / name).write_text(content)
        with raises(PreconditionFailed, field="model"):
            await trainer.open(str(other), checkpoint=str(path))
        (other / name).write_bytes(before)


async def test_corrupt_checkpoint_is_never_loaded(trainer: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "c"
    await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(path)))
    data = max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    before = trainer.stamp
    with raises(DataLoss):
        await trainer.open(checkpoint=str(path))
    with pytest.raises(NotFound):
        await trainer.open(checkpoint=str(tmp_path / "none"))
    # The run goes on with the weights that it held.
    assert await trainer.current_stamp() == before
    assert await trainer.publish() == before


async def test_bad_paths_are_refused_and_the_trainer_goes_on(trainer: Deployment, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    for method, request in (
        (TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest),
        (TrainerService.ExportHuggingFace, pb.ExportHuggingFaceRequest),
    ):
        paths = [tmp_path / "there", tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing/there")]
        for path in [*paths, tmp_path / "nu\0l", tmp_path / "nu\0l" / "below", tmp_path / ("long" * 100), "", "/"]:
            with raises(InvalidInput, field="path"):
                await trainer.call(method, request(path=str(path)))
    assert await trainer.publish() == trainer.stamp


async def test_export_is_what_was_published(trainer: Deployment, tmp_path: Path) -> None:
    await trainer.train(trainer.batch())
    await trainer.publish()
    await trainer.call(TrainerService.ExportHuggingFace, pb.ExportHuggingFaceRequest(path=str(tmp_path / "out")))
    stamp = trainer.stamp
    trainer.models, models = tmp_path, trainer.models
    try:
        await trainer.open("out")
    finally:
        trainer.models = models
    assert (await trainer.publish()).digest == stamp.digest


_MEGATRON: dict[str, Any] = {"strategy": "megatron", "num_ranks": 2}
_SAVERS = {
    "FSDP": {},
    "FSDP, async": {"fsdp": {"async_save": True}},
    "Megatron": _MEGATRON,
    "Megatron, async": _MEGATRON | {"megatron": {"async_save": True}},
}


@pytest_asyncio.fixture(params=marked(_SAVERS, ["FSDP", "Megatron, async"]))
async def saver(deployment: Deployment, request: pytest.FixtureRequest) -> Deployment:
    """Provides a trainer of each way to save, whose weights are published."""
    await deployment.open(**_SAVERS[request.param])
    await deployment.publish()
    return deployment


async def test_a_full_disk_is_named_and_the_trainer_goes_on(saver: Deployment, tmp_path: Path) -> None:
    trainer = saver
    before = tmp_path / "before"
    await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(before)))
    await trainer.train(trainer.batch())
    with small_disk(tmp_path / "disk") as disk:
        disk.fill_up_to(1 << 16)
        for method, request in (
            (TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest),
            (TrainerService.ExportHuggingFace, pb.ExportHuggingFaceRequest),
        ):
            with pytest.raises(
                PreconditionFailed, match=r"disk/.*cannot be written: No space left.*free space"
            ) as caught:
                await trainer.call(method, request(path=str(disk.path / "step-000001")))
            assert caught.value.reason is Reason.STORAGE_FAILED
            assert [path.name for path in disk.path.iterdir()] == ["filler"]
        disk.free()
        (disk.path / ".step-000009.partial").mkdir()  # left by a save that was killed
        path = disk.path / "step-000001"
        await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(path)))
        assert list(disk.path.iterdir()) == [path]
        disk.make_read_only()
        with raises(PreconditionFailed, reason=Reason.STORAGE_FAILED):
            await trainer.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(path) + "1"))
    await trainer.publish()
    assert checkpoint.verify(before).version == 0
    await trainer.train(trainer.batch(seed=1))


async def test_a_disk_that_is_full_for_the_last_files_is_named_too(saver: Deployment, tmp_path: Path) -> None:
    trainer = saver
    await trainer.train(trainer.batch())
    with small_disk(tmp_path / "disk") as disk:
        request = pb.SaveCheckpointRequest(path=str(disk.path / "step-000001"))
        await trainer.call(TrainerService.SaveCheckpoint, request)
        used = os.statvfs(disk.path)
        num_bytes = (used.f_blocks - used.f_bfree) * used.f_frsize
        shutil.rmtree(request.path)
        for num_missing in range(1, 7):  # pages: every small file has its own
            disk.fill_up_to(num_bytes - num_missing * used.f_frsize)
            with raises(PreconditionFailed, reason=Reason.STORAGE_FAILED):
                await trainer.call(TrainerService.SaveCheckpoint, request)
            assert [path.name for path in disk.path.iterdir()] == ["filler"]
            disk.free()
        await trainer.call(TrainerService.SaveCheckpoint, request)
        assert checkpoint.verify(Path(request.path)).version == 1


async def test_an_export_whose_model_is_gone_is_refused_and_the_trainer_goes_on(
    deployment: Deployment, tmp_path: Path
) -> None:
    shutil.copytree(deployment.models / "untied", tmp_path / "model")
    models, deployment.models = deployment.models, tmp_path
    try:
        await deployment.open("model")
    finally:
        deployment.models = models
    (tmp_path / "model" / "config.json").rename(tmp_path / "config.json")
    request = pb.ExportHuggingFaceRequest(path=str(tmp_path / "out"))
    with raises(NotFound, field="model"):
        await deployment.call(TrainerService.ExportHuggingFace, request)
    (tmp_path / "config.json").rename(tmp_path / "model" / "config.json")
    await deployment.call(TrainerService.ExportHuggingFace, request)


async def test_a_repeated_export_is_answered(trainer: Deployment, tmp_path: Path) -> None:
    request = pb.ExportHuggingFaceRequest(path=str(tmp_path / "out"))
    answer = await trainer.call(TrainerService.ExportHuggingFace, request)
    assert answer.num_bytes > 0
    assert await trainer.call(TrainerService.ExportHuggingFace, request) == answer
    await trainer.train(trainer.batch())
    with raises(InvalidInput, field="path"):  # it has other weights
        await trainer.call(TrainerService.ExportHuggingFace, request)


async def test_an_export_has_the_hashes_and_the_dtype_of_its_weights(trainer: Deployment, tmp_path: Path) -> None:
    served = ModelCard(files={"chat_template.jinja": "é".encode()})
    request = pb.ExportHuggingFaceRequest(path=str(tmp_path / "out"), model_card=served)
    for name in ("../model.py", "weights.bin"):
        wrong = pb.ExportHuggingFaceRequest(path=request.path, model_card=ModelCard(files={name: b""}))
        with raises(InvalidInput):
            await trainer.call(TrainerService.ExportHuggingFace, wrong)
    await trainer.call(TrainerService.ExportHuggingFace, request)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == "é".encode()
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    checked = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=True).stdout
    others = {path.name for path in (tmp_path / "out").iterdir()} - {"SHA256SUMS"}
    assert set(checked.splitlines()) == {f"{name}: OK" for name in others}
