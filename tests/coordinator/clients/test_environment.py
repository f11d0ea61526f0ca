"""Tests what a lost episode costs: how often it is played again, and that one whose time is over is not lost."""

from typing import Any

import pytest
from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.rollout import SamplingConfig
from services.common.errors import PreconditionFailed, Reason
from services.coordinator.clients.environment import EnvironmentFailure, EpisodeFailed
from services.coordinator.rl.sampling.collect import PromptRequest
from tests.coordinator.fake_environment import FakeEnvironment, episodes
from tests.coordinator.fake_services import make_config, make_prompt, replicas
from tests.coordinator.rl.sampling.test_episodes import DigitTokenizer, ends_after

STAMP = PolicyStamp(version=2, digest="d" * 32)


class Forgetful(FakeEnvironment):
    """Refuses the first turn of every episode."""

    reason = Reason.EPISODE_NOT_OPEN

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        raise PreconditionFailed(f"no episode {request.episode_id}", reason=self.reason)


@pytest.mark.parametrize(
    ("reason", "episode_s", "failure", "num_played"),
    [
        (Reason.EPISODE_NOT_OPEN, 1800.0, EnvironmentFailure.LOST, 5 + 2),
        (Reason.EPISODE_NOT_OPEN, 1e-3, EnvironmentFailure.TIMEOUT, 2),
        (Reason.RUN_NOT_OPEN, 1e-3, EnvironmentFailure.LOST, 5 + 2),
    ],
)
async def test_an_episode_is_lost_five_times_before_that_uses_up_retries(
    reason: Reason, episode_s: float, failure: EnvironmentFailure, num_played: int
) -> None:
    """One that has taken all of its time was not lost, unless its service was: the service has ended it."""
    environment = Forgetful(ends_after(1))
    environment.reason = reason
    settings = {"kind": "python", "path": "m:C", "max_retries": 1, "episode_s": episode_s, "on_failure": "fail"}
    request = PromptRequest(1, SamplingConfig(max_tokens=8), STAMP, STAMP.version)
    async with (
        replicas(1) as fakes,
        episodes(make_config(environment=settings), fakes, environment, STAMP, DigitTokenizer()) as collector,  # type: ignore[arg-type]
    ):
        with pytest.raises(EpisodeFailed) as raised:
            await collector.one(0, make_prompt(3), request)
    assert raised.value.failure is failure and len(environment.resets) == num_played
