"""Tests that a trainer of two ranks refuses damaged model directories with typed errors, and goes on.

test_models_as_they_come.py has all of them; here is one for each place where an opening can fail: in the service, on
rank 0, on all ranks, or on the one rank that holds a part of a tensor.
"""

import shutil
from pathlib import Path

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.config.trainer import CriticSettings
from services.common.errors import InvalidInput, NotFound, Reason
from tests.support import raises
from tests.trainer.damage import CONFIG, WEIGHTS, Change, contains, has_json, has_tensors, indexed, truncated
from tests.trainer.deployment import Deployment
from tests.trainer.fsdp_harness import config

NORM = "model.norm.weight"
DAMAGE: dict[str, Change] = {
    CONFIG: contains(CONFIG, b"[" * 100_000),
    "hidden_size": has_json(hidden_size=float("nan")),
    "num_hidden_layers 1000000000 is not": has_json(num_hidden_layers=10**9, layer_types=None),
    "tokenizer.json: ": contains("tokenizer.json", b'{"added_tokens": [3]}'),
    "qwen99": has_json(model_type="qwen99"),
    "model.layers.2.": has_json(num_hidden_layers=3, layer_types=None),
    "quantization_config": has_json(quantization_config={"quant_method": "fp8"}),
    f"{WEIGHTS} is not a whole": truncated,
    f"{NORM} has dtype": has_tensors(lambda tensors: tensors.update({NORM: tensors[NORM].char()})),
    "model.absent": indexed(model__absent="shard-1.safetensors"),
    f"{NORM} has numbers": has_tensors(lambda tensors: tensors[NORM][3:4].fill_(float("inf"))),
}


@pytest.fixture
def model(trainer_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trainer_files / "models" / "untied", tmp_path / "model"))


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
async def test_a_trainer_survives(deployment: Deployment, trainer_files: Path, tmp_path: Path, strategy: str) -> None:
    for number, (problem, change) in enumerate(DAMAGE.items()):
        damaged = Path(shutil.copytree(trainer_files / "models" / "untied", tmp_path / str(number)))
        change(damaged)
        with pytest.raises(InvalidInput) as caught:
            await deployment.open(str(damaged), strategy=strategy)
        assert problem in caught.value.message, caught.value.message
        assert (caught.value.reason, caught.value.metadata["field"]) == (Reason.INVALID_INPUT, "model")
    info = (await deployment.call(TrainerService.GetInfo, pb.GetInfoRequest())).info
    assert info.state == "idle"
    await deployment.open("untied", strategy=strategy)
    assert (await deployment.publish()).digest


async def test_missing_directory(deployment: Deployment, tmp_path: Path) -> None:
    with raises(NotFound, field="model"):
        await deployment.open(str(tmp_path / "elsewhere"))
    with raises(InvalidInput, field="model"):
        await deployment.open("a" * 50_000)
    with raises(NotFound, field="path"):
        await deployment.open(checkpoint="a" * 50_000)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
async def test_a_critic_needs_no_output_layer(deployment: Deployment, model: Path, strategy: str) -> None:
    has_tensors(lambda tensors: tensors.update({"score.weight": tensors.pop("lm_head.weight")[:1]}))(model)
    await deployment.open("untied", strategy=strategy)
    settings = CriticSettings.model_validate(config({"strategy": strategy}).model_dump())
    await deployment.open_role(pb.ROLE_CRITIC, settings, str(model))
