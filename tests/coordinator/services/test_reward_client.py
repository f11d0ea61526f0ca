"""Tests, with real services, that the reward client accepts scores only from the scorers that the run opened."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, PolicyStamp

from services.common.errors import DataLoss, PreconditionFailed, Reason
from services.common.rpc.fence import new_token
from services.common.rpc.server import Server
from services.coordinator.data.groups import SampledGroup
from services.coordinator.services.clients.reward import Reward
from services.reward.scorers.exact import ExactScorer
from services.reward.servicer import RewardServicer
from tests.coordinator.fake_services import TOKENIZER, make_config, make_prompt

EXACT = {"kind": "exact"}
GROUP = SampledGroup(0, make_prompt(7), [Completion(tokens=[7], finish_reason=FINISH_REASON_STOP)], PolicyStamp())


@contextlib.asynccontextmanager
async def serving(address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Starts a reward service and yields its address."""
    server, servicer = Server(), RewardServicer()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    port = await server.start(address, ["lockstep.reward.v1.RewardService"])
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.grpc.stop(0)
        await servicer.close()


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Callable[..., Reward]]:
    """Yields a function that creates clients, which are closed afterwards."""
    async with contextlib.AsyncExitStack() as stack:

        def make(address: str, *scorers: dict[str, Any]) -> Reward:
            reward = Reward(address, make_config(reward={"scorers": scorers}))
            stack.push_async_callback(reward.close)
            return reward

        yield make


async def rewards(reward: Reward) -> list[float]:
    return (await reward.score(GROUP, TOKENIZER)).rewards.tolist()  # type: ignore[arg-type, union-attr]


async def test_a_run_never_takes_the_scores_of_another():
    """Scores are rejected even if only the scorers' settings differ."""
    lengths = [{"kind": "length", "target_tokens": 0, "max_tokens": most} for most in (2, 4)]
    async with serving() as address, running() as make:
        ours, theirs = (make(address, length) for length in lengths)
        await ours.open("ours")
        assert await rewards(ours) == [-0.5]
        await theirs.open("theirs")
        assert await rewards(theirs) == [-0.25]
        with pytest.raises(PreconditionFailed, match="run theirs opened its scorers on this service after") as raised:
            await rewards(ours)
        assert raised.value.reason is Reason.SCORER_CHANGED


async def test_a_run_that_was_replaced_does_not_open_its_scorers_again():
    async with serving() as address, running() as make:
        ours, theirs = make(address, EXACT), make(address, EXACT)
        await ours.open("ours")
        with new_token():
            await theirs.open("theirs")
        for _ in range(2):
            with pytest.raises(PreconditionFailed, match="run theirs was opened on this service and has") as raised:
                await rewards(ours)
            assert raised.value.reason is Reason.RUN_REPLACED
        with new_token():
            await theirs.open("theirs")  # the same run, by a coordinator that resumes it
            assert await rewards(theirs) == [1.0]


async def test_a_service_may_come_back_with_the_same_scorers_only(monkeypatch: pytest.MonkeyPatch):
    async with running() as make:
        async with serving() as address:
            reward = make(address, EXACT)
            await reward.open("run")
        async with serving(address):
            assert await rewards(reward) == [1.0]
        monkeypatch.setattr(ExactScorer, "version", "2")
        async with serving(address):
            with pytest.raises(PreconditionFailed, match="has scorers exact 2 x 1, but this run opened exact 1 x 1"):
                await rewards(reward)


async def test_a_reward_that_changed_on_the_way_is_none(monkeypatch: pytest.MonkeyPatch):
    score = RewardServicer.Score

    async def spoiled(self: RewardServicer, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        answer = await score(self, request, context)
        answer.scores[0].reward = -answer.scores[0].reward
        return answer

    monkeypatch.setattr(RewardServicer, "Score", spoiled)
    async with serving() as address, running() as make:
        reward = make(address, EXACT)
        await reward.open("run")
        with pytest.raises(DataLoss, match="changed on the way") as raised:
            await rewards(reward)
    assert raised.value.reason is Reason.CORRUPT_TRANSFER
