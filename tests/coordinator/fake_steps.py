"""Steps of the loop without training, with fake services whose answers depend only on prompt and seed."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from lockstep.reward.v1 import reward_pb2
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import FINISH_REASON_LENGTH, PolicyStamp

from services.common.config.run import Config
from services.common.rpc.transfer import seal
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.prompts import PromptDataset
from services.coordinator.rl.blocks import BlockMaker
from services.coordinator.rl.metrics import step_metrics
from services.coordinator.rl.sampling.collect import Collector
from services.coordinator.rl.step import collect
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import FakeReplica, FakeReward, collector, make_prompt, replicas

GREEDY_TOKEN = 77  # the others are below 50


class Replica(FakeReplica):
    """Starts greedy completions with GREEDY_TOKEN; `is_long` decides by the first token which one is truncated."""

    is_long: Callable[[int], bool] = staticmethod(lambda token: False)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for answer in super().Generate(request, context):
            for completion in answer.completions:
                if request.sampling.temperature == 0:
                    completion.tokens[0] = GREEDY_TOKEN
                elif self.is_long(completion.tokens[0]):
                    completion.finish_reason = FINISH_REASON_LENGTH
            answer.ClearField("sha256")
            yield seal(request, answer)


class Scorer(FakeReward):
    """Computes the reward from the prompt id and the first token; None is a typed failure."""

    def __init__(self, rule: Callable[[str, int], float | None]):
        super().__init__(set())
        self.rule = rule

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        scores = []
        for candidate in request.candidates:
            reward = self.rule(request.prompt_id, int(candidate.text.split()[0]))
            failure = reward_pb2.Failure(reason=reward_pb2.FAILURE_REASON_TIMEOUT, scorer="fake", message="too slow")
            scores.append(
                reward_pb2.Score(failure=failure)
                if reward is None
                else reward_pb2.Score(reward=reward, components={"exact": reward})
            )
        return seal(request, reward_pb2.ScoreResponse(scores=scores, scorer="fake 1"))


class FakePrompts(list):
    digest = "data"


def dataset(num_prompts: int, config: Config) -> PromptDataset:
    order = EpochOrder(num_prompts, config.data.prompts_per_step, seed=config.seed, shuffle=config.data.shuffle)
    return PromptDataset(FakePrompts(make_prompt(index) for index in range(num_prompts)), order)


@dataclass
class Steps:
    """A coordinator that can restart: each `live` opens its run again."""

    config: Config
    data: PromptDataset
    collector: Collector
    replica: Replica

    async def live(self, first: int, last: int) -> dict[int, pa.Table]:
        """Returns the batches of steps first..last-1, collected by a coordinator that starts at version `first`."""
        run = Run(self.config, open_run(self.config))
        context: Any = SimpleNamespace(
            data=self.data, collector=self.collector, block_maker=BlockMaker((), self.config, {})
        )
        batches = {}
        try:
            run.begin(first, ())
            for version in range(first, last):
                stamp = stamp_of(version)
                with run.phase(Phase.GENERATING):
                    recorded = run.record.recorded_batch(version, stamp)
                    batches[version] = recorded or run.record.record_batch(await collect(run, context, stamp, version))
                run.finish_step(version + 1, step_metrics(run, {}, batches[version]))
        finally:
            run.close()
        return batches


def stamp_of(version: int) -> PolicyStamp:
    return PolicyStamp(version=version, digest=f"digest {version}")


@contextlib.asynccontextmanager
async def steps(config: Config, num_prompts: int, rule: Callable[[str, int], float | None]) -> AsyncIterator[Steps]:
    async with replicas(1, Replica) as fakes, collector(config, fakes, Scorer(rule), stamp_of(0)) as collects:
        yield Steps(config, dataset(num_prompts, config), collects, fakes[0])
