"""Tests what episodes that hang or crash cost: their own prompt, and nobody else's. The environment is a real one."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.reward.v1 import environment_pb2_grpc, reward_pb2_grpc
from lockstep.types.v1.types_pb2 import ModelCard
from prometheus_client import CollectorRegistry

from services.common.config.run import Config
from services.common.errors import LockstepError, Reason
from services.common.rpc.server import Server
from services.common.tasks import gather
from services.coordinator.clients.environment import Environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.rl.sampling.collect import PromptRequest
from services.coordinator.rl.sampling.episodes import EpisodeCollector
from services.reward.metrics import RewardMetrics
from services.reward.servicer import RewardServicer
from tests.coordinator.fake_environment import FakeEnvironment
from tests.coordinator.fake_services import make_config, make_prompt, replicas
from tests.coordinator.rl.sampling.test_episodes import (
    SAMPLING,
    STAMP,
    TIMEOUT,
    DigitTokenizer,
    ends_after,
    played,
    played_on,
)

NEIGHBOR = pb.ENVIRONMENT_FAILURE_REASON_NEIGHBOR
HURT = pb.EnvironmentFailure(reason=NEIGHBOR, message="the worker died")
HUNG = pb.EnvironmentFailure(reason=TIMEOUT, message="no reply", alone=True)
HUNG_ALONE = pb.EnvironmentFailure(reason=TIMEOUT, message="no reply: step of 'select'")


@pytest.mark.parametrize("failures", [[HUNG], [HURT] * 3, [HURT, HUNG, HURT], [HURT] * 5 + [HUNG]])
async def test_what_others_may_have_done_costs_no_retry(failures: list[Any]):
    environment = FakeEnvironment(ends_after(1), failures)
    (group,) = await played(environment, max_retries=0)
    assert group is not None and len(environment.resets) == 2 + len(failures)


async def test_an_episode_that_hung_or_was_hurt_often_is_played_alone():
    environment = FakeEnvironment(ends_after(1), [HUNG])
    await played(environment, max_retries=0)
    hung = environment.steps[0].episode_id.rpartition("/")[0]
    alone = {request.episode_id.rpartition("/")[0] for request in environment.resets if request.alone}
    assert alone == {hung}
    environment = FakeEnvironment(ends_after(1), [HURT] * 6)
    await played(environment, max_retries=0)
    assert 1 <= sum(request.alone for request in environment.resets) <= 2


async def test_an_episode_that_hangs_again_is_set_aside_with_its_prompt(caplog: pytest.LogCaptureFixture):
    environment = FakeEnvironment(ends_after(9), [HUNG] * 2 + [HUNG_ALONE] * 2)
    assert await played(environment, max_retries=5) == [None]
    assert played_on.metrics["environment/set_aside"] == 1.0  # type: ignore[attr-defined]
    assert "environment: set_aside: hangs again, alone in a worker: prompt p0 sample" in caplog.text
    assert len(environment.resets) <= 4


async def test_a_service_that_always_blames_others_ends_too():
    (group,) = await played(FakeEnvironment(ends_after(1), [HURT] * 100), keep_failed=True, max_retries=1)
    assert group is not None and group.is_failed.all()


@contextlib.asynccontextmanager
async def real(config: Config, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EpisodeCollector]:
    """Yields a collector whose episodes are played by the reward service, in its worker processes."""
    monkeypatch.chdir(Path(__file__).parents[3] / "reward" / "environments")
    server, servicer = Server(), RewardServicer(RewardMetrics(CollectorRegistry()))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer.environments, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    async with replicas(1) as fakes:
        rollout, rewards = Rollout([fakes[0].address], config), Rewards([f"127.0.0.1:{port}"], config)
        try:
            await rollout.open("run", ModelCard())
            await rewards.open("run")
            await rollout.replicas[0].commit(STAMP)
            assert config.environment
            environments = Environments(rewards, config.environment)
            yield EpisodeCollector(rollout, rewards, DigitTokenizer(), config, environments)  # type: ignore[arg-type]
            await environments.close()
        finally:
            await rollout.close()
            await rewards.close()
            await servicer.close()
            await server.grpc.stop(0)


def harmful(rows: list[str], how: str, where: str = "step", **settings: Any) -> Config:
    kwargs = {"rows": rows, "how": how, "where": where, "step_s": 0.1}
    name = settings.pop("name", "Harmful")
    return make_config(
        environment={
            "kind": "python",
            "path": f"user_environments:{name}",
            "kwargs": kwargs,
            "turn_s": 2.0,
            **settings,
        },
        rollout={"max_model_len": 200, "sampling": {"max_tokens": 8}},
        data={"train": "x.parquet", "prompts_per_step": 8, "max_prompt_tokens": 16},
        reward={"scorers": []},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "name"),
    [
        pytest.param("queries", "step", "Harmful", marks=pytest.mark.long),
        pytest.param("exits", "step", "Harmful", marks=pytest.mark.long),
        pytest.param("stalls", "step", "Harmful", marks=pytest.mark.long),
        ("sleeps", "reset", "Harmful"),
        pytest.param("stalls", "step", "AsyncHarmful", marks=pytest.mark.long),
        pytest.param("segfaults", "step", "Harmful", marks=pytest.mark.long),
        pytest.param("is_killed", "reset", "Harmful", marks=pytest.mark.long),
    ],
)
async def test_one_bad_row_costs_its_own_group_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str, where: str, name: str
):
    """A call that blocks the event loop makes others late too, which is their own fault if they are late again."""
    max_retries = 5 if name == "AsyncHarmful" else 0
    async with real(harmful(["text 3"], how, where, name=name, max_retries=max_retries), monkeypatch) as collector:
        for step in range(2):
            draw = PromptRequest(2, SAMPLING, STAMP, step)
            groups = await gather(collector.one(i, make_prompt(i), draw) for i in range(16))
            assert [index for index, group in enumerate(groups) if group is None] == [3]
            metrics = collector.take_metrics()
            assert metrics.get("environment/set_aside", 0) == (how not in ("exits", "segfaults", "is_killed"))
    assert "prompt p3 sample" in caplog.text


@pytest.mark.long  # tests/reward/environments/test_workers.py shows what a hanging close costs
async def test_an_environment_that_hangs_in_close_costs_no_group(monkeypatch: pytest.MonkeyPatch):
    async with real(harmful(["text 3"], "sleeps", "close", max_retries=0), monkeypatch) as collector:
        groups = await gather(collector.one(i, make_prompt(i), PromptRequest(2, SAMPLING, STAMP, 1)) for i in range(8))
        assert all(groups)


@pytest.mark.long
async def test_a_policy_that_always_hangs_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch):
    rows = [f"text {index}" for index in range(3)]
    async with real(harmful(rows, "queries"), monkeypatch) as collector:
        groups = await gather(collector.one(i, make_prompt(i), PromptRequest(2, SAMPLING, STAMP, 1)) for i in range(3))
        assert groups == [None] * 3
        why = str(collector.failure_log.last)
        assert "set_aside: hangs again, alone in a worker: prompt p" in why and "(environment.turn_s): step of '" in why
        with pytest.raises(LockstepError, match="prompt p0 sample 0: no reply within") as raised:
            await collector.collect("math", [make_prompt(0)], 1, SAMPLING, STAMP)
        assert raised.value.reason is Reason.REWARD_FAILED
