"""A fake environment on real gRPC, because no real one can fail on demand at a given moment."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.reward.v1 import environment_pb2_grpc, reward_pb2, reward_pb2_grpc
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp

from services.common.config.run import Config
from services.common.errors import PreconditionFailed, Reason
from services.common.rpc.server import Server
from services.coordinator.clients.environment import Environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.rl.sampling.episodes import EpisodeCollector
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.fake_services import FakeReplica, FakeReward

Script = Callable[[int, str], pb.StepResponse]


class FakeEnvironment(environment_pb2_grpc.EnvironmentServiceServicer):
    """Answers turn k of an episode with `script(k, text)`. `failures` (or reasons) come first, one to each Step."""

    def __init__(self, script: Script, failures: Sequence[Any] = ()):
        self.script, self.failures = script, list(failures)
        self.first: Sequence[pb.Message] = ()
        self.forgets_before: set[int] = set()
        self.open: dict[str, int] = {}
        self.resets: list[pb.ResetRequest] = []
        self.steps: list[pb.StepRequest] = []
        self.most_open = 0

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.ResetResponse:
        self.resets.append(request)
        self.open[request.episode_id] = 0
        self.most_open = max(self.most_open, len(self.open))
        return pb.ResetResponse(messages=self.first)

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        if request.turn in self.forgets_before:  # as a service does that was restarted
            self.forgets_before.discard(request.turn)
            self.open.pop(request.episode_id)
        if self.open.get(request.episode_id) != request.turn:
            raise PreconditionFailed(f"no episode {request.episode_id}", reason=Reason.EPISODE_NOT_OPEN)
        self.steps.append(request)
        if self.failures:
            failure = self.failures.pop(0)
            if not isinstance(failure, pb.EnvironmentFailure):
                failure = pb.EnvironmentFailure(reason=failure, message="on demand")
            return pb.StepResponse(failure=failure)
        self.open[request.episode_id] += 1
        return self.script(request.turn, request.text)

    async def Close(self, request: pb.CloseRequest, context: Any) -> pb.CloseResponse:
        self.open.pop(request.episode_id, None)
        return pb.CloseResponse()


class OpensEnvironment(FakeReward):
    """Answers OpenRun as a reward service with an environment whose messages are raw text."""

    async def OpenRun(self, request: Any, context: Any) -> reward_pb2.OpenRunResponse:
        return reward_pb2.OpenRunResponse(scorer="fake 1", environment="fake 1", roles=[""])


@contextlib.asynccontextmanager
async def episodes(
    config: Config,
    fakes: Sequence[FakeReplica],
    environment: FakeEnvironment,
    stamp: PolicyStamp,
    tokenizer: Tokenizer,
    scorer: FakeReward | None = None,
) -> AsyncIterator[EpisodeCollector]:
    """Yields a collector of episodes over `fakes`, all of which serve `stamp`, and `environment`."""
    server = Server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(scorer or OpensEnvironment(set()), server.grpc)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(environment, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    rollout, rewards = Rollout([fake.address for fake in fakes], config), Rewards([f"127.0.0.1:{port}"], config)
    try:
        await rollout.open("run", ModelCard())
        await rewards.open("run")
        for replica in rollout.replicas:
            await replica.commit(stamp)
        assert config.environment
        environments = Environments(rewards, config.environment)
        yield EpisodeCollector(rollout, rewards, tokenizer, config, environments)
        await environments.close()
    finally:
        await rollout.close()
        await rewards.close()
        await server.grpc.stop(0)
