"""Tests that `lockstep doctor` asks the trainer about models that only it can judge."""

import pytest

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.coordinator.doctor import inputs
from services.coordinator.doctor.inputs import examine_inputs
from services.coordinator.fleet.launch import Addresses
from tests.coordinator.doctor.findings import FAIL, assert_fails, config_with


@pytest.mark.parametrize("use_mbridge", [False, True])
def test_a_model_that_mbridge_builds_is_compared_by_the_trainer(
    use_mbridge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def describe(directory: str, trainer: TrainerConfig) -> None:
        asked.append(trainer)
        raise InvalidInput("differs", field="model")

    monkeypatch.setattr(inputs, "describe_model", describe)
    trainer = {"strategy": "megatron", "num_ranks": 1, "megatron": {"use_mbridge": use_mbridge}}
    model, *_ = examine_inputs(config_with(trainer=trainer), Addresses())
    assert len(asked) == use_mbridge
    if use_mbridge:
        assert_fails(model, FAIL, "differs", "this strategy can train")
