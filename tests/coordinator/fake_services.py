"""Fake services on real gRPC, because no real service can fail on demand at a given moment."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lockstep.reward.v1 import reward_pb2, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.types.v1.types_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Completion,
    ModelCard,
    PolicyStamp,
    ServiceInfo,
)

from services.common.batches import tokens_sha256
from services.common.config.run import Config
from services.common.errors import LockstepError
from services.common.rpc.server import Server
from services.common.rpc.transfer import seal
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.prompts import Prompt
from services.coordinator.rl.sampling.collect import Collector
from tests.support import PATIENCE_S, free_port

TOKENIZER = SimpleNamespace(
    eos_token_ids=(1,),
    decode=lambda tokens, **_: " ".join(map(str, tokens)),
    has_token=lambda text: False,
    decode_batch=lambda texts: [" ".join(map(str, tokens)) for tokens in texts],
    encode=lambda text: [*text.encode()],
)


def make_config(**sections: Any) -> Config:
    return Config(
        **{
            "model": "m",
            "data": {"train": "x.parquet", "prompts_per_step": 8},
            "reward": {"scorers": [{"kind": "exact"}]},
            "timeouts": dict.fromkeys(("info_s", "open_s", "generate_s", "score_s", "publish_s"), PATIENCE_S),
            **sections,
        }
    )


def make_prompt(index: int, num_tokens: int = 3) -> Prompt:
    text = f"text {index}"
    return Prompt(f"p{index}", text, (5,) * num_tokens, str(index), {}, ({"role": "", "content": text},), text)


class FakeReplica(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves any requested stamp; `error` and `before_answer` make its answers fail or wait."""

    def __init__(self, max_samples: int = 64):
        self.max_samples = max_samples
        self.error: dict[str, LockstepError] = {}
        self.failures_left = math.inf
        self.hangs_in = ""
        """A method whose calls are never answered, until the run is closed."""
        self.before_answer: Callable[[pb.Prompt], Any] | None = None
        self.incarnation = ""
        self.digest = "digest"
        self.quantized_digest = ""
        self.plan_digest = "plan"
        self.seen_prompt: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: tokens
        self.drafts = pb.Drafts()
        self.answered: list[str] = []
        self.committed: list[PolicyStamp] = []
        self.epochs: list[tuple[int, int]] = []
        self.num_opens = self.in_flight = self.peak = 0
        self.closed: list[str] = []
        self._server: Server | None = None
        self.address = f"127.0.0.1:{free_port()}"

    async def start(self) -> None:
        """Starts to listen; on the same port when called again."""
        self._server = Server()
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self._server.grpc)
        await self._server.start(self.address, ["lockstep.rollout.v1.RolloutService"])

    async def die(self) -> None:
        """Stops the server; all calls in progress fail."""
        if self._server:
            server, self._server = self._server, None
            await server.grpc.stop(0)

    def _fail(self, method: str) -> None:
        if method in self.error and self.failures_left:
            self.failures_left -= 1
            raise self.error[method]

    async def _hang(self, method: str) -> None:
        if method == self.hangs_in:
            await asyncio.Event().wait()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        info = ServiceInfo(incarnation=self.incarnation)
        return pb.GetInfoResponse(info=info, num_workers=1, max_samples=self.max_samples)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        self._fail("OpenRun")
        self.num_opens += 1
        return pb.OpenRunResponse(num_workers=1, max_samples=self.max_samples)

    async def CloseRun(self, request: pb.CloseRunRequest, context: Any) -> pb.CloseRunResponse:
        self._fail("CloseRun")
        self.closed.append(request.run_id)
        self.hangs_in = ""
        return pb.CloseRunResponse()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._fail("Generate")
        (prompt,) = request.prompts
        self.in_flight += len(prompt.seeds)
        self.peak = max(self.peak, self.in_flight)
        try:
            if self.before_answer:
                await self.before_answer(prompt)
        finally:
            self.in_flight -= len(prompt.seeds)
        self.answered.append(prompt.prompt_id)
        most = request.sampling.max_tokens
        reason = FINISH_REASON_STOP if most > 1 else FINISH_REASON_LENGTH
        completions = [
            Completion(tokens=[seed % 50, 1][:most], logprobs=[-1, -2][:most], finish_reason=reason, seed=seed)
            for seed in prompt.seeds
        ]
        seen = self.seen_prompt(prompt.tokens)
        answer = pb.GenerateResponse(
            prompt_id=prompt.prompt_id,
            completions=completions,
            stamp=request.expected_stamp,
            prompt_num_tokens=len(seen),
            prompt_sha256=tokens_sha256(seen),
            num_cached_tokens=len(prompt.seeds),
            drafts=self.drafts,
        )
        yield seal(request, answer)

    async def JoinWeightGroup(self, request: pb.JoinWeightGroupRequest, context: Any) -> pb.JoinWeightGroupResponse:
        self._fail("JoinWeightGroup")
        await self._hang("JoinWeightGroup")
        self.epochs.append((request.group.epoch, request.group.world_size))
        return pb.JoinWeightGroupResponse(plan_digest=self.plan_digest)

    async def ReceiveWeights(self, request: pb.ReceiveWeightsRequest, context: Any) -> pb.ReceiveWeightsResponse:
        self._fail("ReceiveWeights")
        await self._hang("ReceiveWeights")
        return pb.ReceiveWeightsResponse(digest=self.digest, quantized_digest=self.quantized_digest)

    async def CommitWeights(self, request: pb.CommitWeightsRequest, context: Any) -> pb.CommitWeightsResponse:
        self._fail("CommitWeights")
        await self._hang("CommitWeights")
        self.committed.append(request.stamp)
        return pb.CommitWeightsResponse()


class FakeReward(reward_pb2_grpc.RewardServiceServicer):
    """Gives reward 1 to each sample, and a typed failure to the first sample of the prompts in `failing`."""

    def __init__(self, failing: set[str]):
        self.failing = failing
        self.closed: list[str] = []
        self.num_judged: list[int] = []

    async def OpenRun(self, request: Any, context: Any) -> reward_pb2.OpenRunResponse:
        return reward_pb2.OpenRunResponse(scorer="fake 1")

    async def CloseRun(self, request: reward_pb2.CloseRunRequest, context: Any) -> reward_pb2.CloseRunResponse:
        self.closed.append(request.run_id)
        return reward_pb2.CloseRunResponse()

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self.num_judged.append(len(request.candidates))
        scores = [reward_pb2.Score(reward=1.0, components={"fake": 1.0}) for _ in request.candidates]
        if request.prompt_id in self.failing:
            failure = reward_pb2.Failure(reason=reward_pb2.FAILURE_REASON_TIMEOUT, scorer="fake", message="too slow")
            scores[0] = reward_pb2.Score(failure=failure)
        return seal(request, reward_pb2.ScoreResponse(scores=scores, scorer="fake 1"))


@contextlib.asynccontextmanager
async def replicas(num: int, kind: type[FakeReplica] = FakeReplica, **options: Any) -> AsyncIterator[list[Any]]:
    fakes = [kind(**options) for _ in range(num)]
    try:
        for fake in fakes:
            await fake.start()
        yield fakes
    finally:
        await asyncio.gather(*(fake.die() for fake in fakes))


@contextlib.asynccontextmanager
async def collector(
    config: Config, fakes: Sequence[FakeReplica], scorer: FakeReward, stamp: PolicyStamp
) -> AsyncIterator[Collector]:
    """Yields a collector over `fakes`, all of which serve `stamp`, and `scorer`."""
    server = Server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(scorer, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    rollout, reward = Rollout([fake.address for fake in fakes], config), Rewards([f"127.0.0.1:{port}"], config)
    try:
        await rollout.open("run", ModelCard())
        for replica in rollout.replicas:
            await replica.commit(stamp)
        yield Collector(rollout, reward, TOKENIZER, config.seed)  # type: ignore[arg-type]
    finally:
        await rollout.close()
        await reward.close()
        await server.grpc.stop(0)
