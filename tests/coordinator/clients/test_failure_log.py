"""Tests that a cause that fails many samples is two lines on the terminal, and that errors name it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.rollout import SamplingConfig
from services.common.config.run import Config
from services.common.errors import LockstepError, Reason
from services.coordinator.clients.reward import Cause, FailureLog
from tests.coordinator.fake_environment import FakeEnvironment, episodes
from tests.coordinator.fake_services import TOKENIZER, make_config, make_prompt, replicas
from tests.coordinator.fake_steps import steps

SLOW = "scorer fake: TIMEOUT: too slow"
DROPS = "prompts with failed samples (reward.on_failure: drop_group)"


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the lines of the terminal, without those of the loop."""
    return [
        r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.endswith("clients.reward")
    ]


def config_of(tmp_path: Path, **sections: Any) -> Config:
    rollout = {"completions_per_prompt": 2}
    data = {"train": "x.parquet", "prompts_per_step": 4}
    return make_config(**{"runs_dir": tmp_path, "data": data, "rollout": rollout, **sections})


def fails(prompt_ids: set[str]) -> Callable[[str, int], float | None]:
    return lambda prompt_id, token: None if prompt_id in prompt_ids else float(token % 2)


async def test_each_step_has_one_line_for_a_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = config_of(tmp_path, data={"train": "x.parquet", "prompts_per_step": 4, "shuffle": False})
    caplog.set_level(logging.INFO)
    async with steps(config, 8, fails({"p0", "p1", "p2", "p5"})) as given:
        await given.live(0, 2)
    first, *counts = shown(caplog)
    assert first.startswith("prompt p") and first.endswith(SLOW)
    assert counts == [f"step 1: 3 {DROPS}: {SLOW}", f"step 2: 1 {DROPS}: {SLOW}"]
    files = [record.getMessage() for record in caplog.records]
    assert {f"prompt p{index}: {SLOW}" for index in (0, 1, 2, 5)} <= set(files), "the log file has each failure"


async def test_a_step_without_any_score_names_the_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with steps(config_of(tmp_path), 8, lambda prompt_id, token: None) as given:
        with pytest.raises(LockstepError) as raised:
            await given.live(0, 1)
    assert raised.value.reason is Reason.TOO_FEW_GROUPS
    assert raised.value.message.endswith(f"4 no_score: too few to train on; the last without a score: {SLOW}")
    assert len(shown(caplog)) == 2


async def test_an_evaluation_whose_environment_always_fails_names_it(caplog: pytest.LogCaptureFixture):
    config = make_config(environment={"kind": "python", "path": "m:C", "max_retries": 0}, reward={"scorers": []})
    environment = FakeEnvironment(lambda *_: pb.StepResponse(), [pb.ENVIRONMENT_FAILURE_REASON_CRASHED] * 6)
    stamp = PolicyStamp(version=2, digest="d" * 32)
    async with (
        replicas(1) as fakes,
        episodes(config, fakes, environment, stamp, TOKENIZER) as collector,  # type: ignore[arg-type]
    ):
        with pytest.raises(LockstepError) as raised:
            await collector.collect("math", [make_prompt(i) for i in range(3)], 2, SamplingConfig(max_tokens=8), stamp)
    assert raised.value.reason is Reason.REWARD_FAILED
    cause = "environment: crashed: on demand"
    assert raised.value.message == f"data.eval.math: none of 3 prompts has a sample with a reward: {cause}"
    first, count = shown(caplog)
    assert first.endswith(cause)
    counts_as = "a sample without a reward counts as 0"
    assert count == f"evaluation of math: 6 failures of episodes, also of those played again ({counts_as}): {cause}"


def test_causes_differ_by_the_class_of_the_exception(caplog: pytest.LogCaptureFixture):
    failures = FailureLog(make_config())
    for period in ("step 1", "step 2"):
        with failures.counting(period, is_evaluation=False):
            for sample in range(3):
                failures.add(Cause("scorer python", "ERROR", f"KeyError: 'sample {sample}'"), "prompt p0")
            failures.add(Cause("scorer python", "ERROR", "ValueError: no number"), "prompt p1")
    lines = shown(caplog)
    assert [line.partition(":")[0] for line in lines] == ["prompt p0", "prompt p1", *["step 1"] * 2, *["step 2"] * 2]
    assert lines[2].startswith("step 1: 3 prompts") and lines[2].endswith("'sample 2'")
    assert failures.last is not None and failures.last.message == "ValueError: no number"
    with failures.counting("step 3", is_evaluation=False):
        pass
    assert failures.last is None and shown(caplog) == lines
