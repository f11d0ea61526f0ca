"""Benchmarks need GPUs, and what they use changes: here is tried of them what a CPU can try."""

import fnmatch
import shlex
import sys
from pathlib import Path

import pytest
from lockstep.types.v1.types_pb2 import PolicyStamp

from benchmarks import colocated, gpu, rollout, speculation, step, train_cases
from benchmarks.megatron_layouts import MODELS
from benchmarks.rollout_ends import Service
from services.common.config.load import load
from services.common.config.rollout import RolloutConfig, SamplingConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.clients.gpus import split_gpus
from tests.coordinator.fake_services import FakeReward, collector, make_config, make_prompt, replicas

STAMP = PolicyStamp(version=2, digest="d" * 32)
COMMANDS = [(needed, shlex.split(command)) for needed, command in gpu.commands()]


async def test_the_rollout_benchmark_times_every_group_and_counts_every_token():
    config, prompts = make_config(rollout={"completions_per_prompt": 4}), [make_prompt(index) for index in range(5)]
    async with replicas(2) as fakes, collector(config, fakes, FakeReward(set()), STAMP) as collects:
        service = Service(collects._rollout, config, STAMP, pids=())
        batch = service.batch(prompts, SamplingConfig())
        drawn = await service.draw(batch)
    assert [len(set(seeds)) for seeds in batch.seeds] == [4] * 5
    assert drawn.num_tokens == 5 * 4 * 2  # a replica's samples have two tokens here
    assert len(drawn.finished_s) == 5
    assert 0 < min(drawn.finished_s) <= max(drawn.finished_s) <= drawn.duration_s


def test_each_result_has_a_name_of_its_own():
    names = [name for _, (_, name, *_) in COMMANDS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("needed", "command"), COMMANDS, ids=[command[1] for _, command in COMMANDS])
def test_a_command_means_something_and_needs_the_gpus_that_it_says(
    needed: int, command: list[str], monkeypatch: pytest.MonkeyPatch
):
    module, _, shape, *arguments = command
    if module == "train":
        patterns = arguments[0].split(",")
        found = [case for label, case in train_cases.cases() if any(fnmatch.fnmatch(label, p) for p in patterns)]
        assert {case.world for case in found} == {needed}
        return
    assert module == "loop" or shape in MODELS
    if module in ("routing", "speculation"):  # an engine and then a rank, or two engines, one after the other
        assert needed == 1
        if module == "speculation":
            monkeypatch.setattr(sys, "argv", command)
            RolloutConfig.model_validate({"speculation": {"kind": speculation.parse().kind}})
        return
    overrides = [argument for argument in (shape, *arguments) if "=" in argument]
    if module in ("step", "colocated"):
        shared = colocated._SHARED if module == "colocated" else ()
        overrides = [*step.fixed(Path("model"), step.WHOLE), *shared, *overrides]
    elif module == "rollout":
        monkeypatch.setattr(sys, "argv", command)
        overrides = [*rollout.fixed(rollout.parse(), Path("model")), *overrides]
    config = load(Config, ["deploy/runs/quickstart.yaml", *overrides])
    ranks = {"trainer": config.trainer.num_ranks}
    assert split_gpus(ranks, config, available=[str(index) for index in range(needed)], start_rollout=True)
    if needed > 1:  # without any GPU, everything runs on CPU
        with pytest.raises(InvalidInput):
            split_gpus(ranks, config, available=[str(index) for index in range(needed - 1)], start_rollout=True)
