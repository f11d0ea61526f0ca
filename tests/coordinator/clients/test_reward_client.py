"""Tests, with real services, that the reward client accepts scores only from the scorers that the run opened."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, PolicyStamp

from services.common.errors import DataLoss, DeadlineExceeded, LockstepError, PreconditionFailed, Reason, Unavailable
from services.common.rpc.fence import new_token
from services.common.rpc.server import Server
from services.common.rpc.transfer import seal
from services.coordinator.clients import reward as clients
from services.coordinator.clients.reward import Reward
from services.coordinator.data.groups import Episode, SampledGroup
from services.reward.scorers.text import ExactScorer
from services.reward.servicer import RewardServicer
from tests.coordinator.fake_services import TOKENIZER, make_config, make_prompt
from tests.support import LIMITS_S, PATIENCE_S, raises

EXACT = {"kind": "exact"}
GROUP = SampledGroup(0, make_prompt(7), [Completion(tokens=[7], finish_reason=FINISH_REASON_STOP)], PolicyStamp())


@contextlib.asynccontextmanager
async def serving(address: str = "127.0.0.1:0", servicer: RewardServicer | None = None) -> AsyncIterator[str]:
    """Starts a reward service and yields its address."""
    server, servicer = Server(), servicer or RewardServicer()
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


class FaultyServicer(RewardServicer):
    """Answers a prompt whose id is in `faults` with the function there, and other prompts as usual."""

    def __init__(self, faults: dict[str, Callable[[pb.ScoreRequest], Awaitable[pb.ScoreResponse | None]]]):
        super().__init__()
        self.faults = faults

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        fault = self.faults.get(request.prompt_id)
        answer = await fault(request) if fault else None
        return seal(request, answer) if answer else await super().Score(request, context)


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
        with raises(PreconditionFailed, reason=Reason.SCORER_CHANGED):
            await rewards(ours)


@pytest.mark.parametrize("is_integer", [True, False])
async def test_an_answer_that_is_an_integer_reaches_functions_as_one(is_integer: bool):
    path, kwargs = "tests.reward.reward_functions:reads_integer", {"column": "answer"}
    config = make_config(reward={"scorers": [{"kind": "python", "path": path, "kwargs": kwargs}], "on_failure": "fail"})
    group = replace(GROUP, prompt=replace(GROUP.prompt, answer_is_integer=is_integer))
    async with serving() as address, contextlib.AsyncExitStack() as stack:
        reward = Reward(address, config)
        stack.push_async_callback(reward.close)
        await reward.open("run")
        assert (await reward.score(group, TOKENIZER)).rewards.tolist() == [float(is_integer)]


async def test_functions_read_the_answer_by_the_name_of_its_column():
    function = {"kind": "python", "path": "tests.reward.reward_functions:reads_solution"}
    config = make_config(reward={"scorers": [function], "on_failure": "fail"})
    renamed = config.model_copy(update={"data": config.data.model_copy(update={"answer_column": "solution"})})
    async with serving() as address, contextlib.AsyncExitStack() as stack:
        for settings in (renamed, config):
            reward = Reward(address, settings)
            stack.push_async_callback(reward.close)
            await reward.open("run")
            if settings is renamed:
                assert await rewards(reward) == [1.0]
        with raises(LockstepError, reason=Reason.REWARD_FAILED):  # the same run with another column opens anew
            await rewards(reward)


async def test_tokens_are_sent_only_to_scorers_that_read_them():
    function = {"kind": "python", "path": "tests.reward.reward_functions:trl_token_ids"}
    tokens = [5, 7, 9, 2]
    of_two_turns = Episode([0, 2], [1, 4], [0.0, 0.0], "tools 1")
    group = replace(GROUP, completions=[Completion(tokens=tokens, finish_reason=FINISH_REASON_STOP)])
    async with serving() as address, running() as make:
        for scorers in ([function], [EXACT]):
            reward = make(address, *scorers)
            await reward.open("run")
            requests = [reward._request(one, TOKENIZER) for one in (group, replace(group, episodes=[of_two_turns]))]
            sent = [list(request.candidates[0].tokens) for request in requests]
            assert sent == ([tokens, tokens[2:]] if scorers == [function] else [[], []])
            if scorers == [function]:
                scored = await reward.score(group, TOKENIZER)
                assert scored and scored.rewards.tolist() == [sum(tokens)]


async def test_a_run_that_was_replaced_does_not_open_its_scorers_again():
    async with serving() as address, running() as make:
        ours, theirs = make(address, EXACT), make(address, EXACT)
        await ours.open("ours")
        with new_token():
            await theirs.open("theirs")
        for _ in range(2):
            with raises(PreconditionFailed, reason=Reason.RUN_REPLACED):
                await rewards(ours)
        with new_token():
            await theirs.open("theirs")  # the same run, by a coordinator that resumes it
            assert await rewards(theirs) == [1.0]


async def test_a_replica_that_holds_an_earlier_run_is_opened_when_calls_move_to_it():
    """A name with several replicas behind it connects to another one when the first is gone."""
    async with serving() as here, serving() as there, running() as make:
        ours, earlier = make(here, EXACT), make(there, {"kind": "length", "target_tokens": 0, "max_tokens": 2})
        await ours.open("run")
        with new_token():
            await earlier.open("earlier")
            await ours._client.close()
            ours._client = earlier._client  # the connection is now to the other replica
        assert await rewards(ours) == [1.0]
        with new_token(), raises(PreconditionFailed, reason=Reason.RUN_NOT_OPEN):
            await ours._client.call(RewardService.Score, ours._request(GROUP, TOKENIZER), timeout_s=PATIENCE_S)  # type: ignore[arg-type]


async def test_a_service_may_come_back_with_the_same_scorers_only(monkeypatch: pytest.MonkeyPatch):
    async with running() as make:
        async with serving() as address:
            reward = make(address, EXACT)
            await reward.open("run")
        async with serving(address):
            assert await rewards(reward) == [1.0]
        monkeypatch.setattr(ExactScorer, "version", "3")
        async with serving(address):
            with raises(PreconditionFailed, reason=Reason.SCORER_CHANGED):
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
        with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
            await rewards(reward)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_is_refused_with_its_sample(number: float):
    async def answer(request: pb.ScoreRequest) -> pb.ScoreResponse:
        return pb.ScoreResponse(scores=[pb.Score(reward=number)], scorer="exact 2 x 1")

    async with serving(servicer=FaultyServicer({"p7": answer})) as address, running() as make:
        reward = make(address, EXACT)
        await reward.open("run")
        with raises(LockstepError, reason=Reason.REWARD_FAILED) as raised:
            await rewards(reward)
        assert f"prompt p7 sample 0: reward is {number} (scorer exact 2" in raised.value.message


async def test_a_full_queue_does_not_end_the_run():
    """Tests a group whose first call waits until its deadline, while another group is scored; a second one succeeds."""
    for limit_s in LIMITS_S:
        waiting, num_calls = asyncio.Event(), 0

        async def wait_once(request: pb.ScoreRequest) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                waiting.set()  # noqa: B023 awaited in this round
                await asyncio.Event().wait()

        async with serving(servicer=FaultyServicer({"p7": wait_once})) as address:
            timeouts = {"open_s": 600, "score_s": limit_s}
            reward = Reward(address, make_config(reward={"scorers": [EXACT]}, timeouts=timeouts))
            await reward.open("run")
            first = asyncio.create_task(reward.score(GROUP, TOKENIZER))
            await waiting.wait()
            other = SampledGroup(1, make_prompt(8), GROUP.completions, PolicyStamp())
            try:
                await reward.score(other, TOKENIZER)
                scored = await first
            except DeadlineExceeded:  # a busy machine
                continue
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await reward.close()
        assert scored is not None
        assert (scored.rewards.tolist(), num_calls) == ([1.0], 2)
        return
    raise AssertionError("no call was answered in time")


async def test_a_service_that_scores_nothing_ends_the_run():
    async def never(request: pb.ScoreRequest) -> None:
        await asyncio.Event().wait()

    async with serving(servicer=FaultyServicer({"p7": never})) as address:
        timeouts = {"open_s": 600, "score_s": 0.5}
        reward = Reward(address, make_config(reward={"scorers": [EXACT]}, timeouts=timeouts))
        await reward.open("run")
        with pytest.raises(DeadlineExceeded):
            await reward.score(GROUP, TOKENIZER)
        await reward.close()


async def test_a_run_that_stops_does_not_wait_long_for_a_service_that_has_stopped_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "_STOPPING_S", 0.2)
    is_stopping, config = False, make_config(reward={"scorers": [EXACT]}, timeouts={"open_s": 600})
    async with serving() as address:
        reward = Reward(address, config, is_stopping=lambda: is_stopping)
        await reward.open("run")
    is_stopping = True
    with raises(Unavailable, reason=Reason.UNREACHABLE):
        await reward.score(GROUP, TOKENIZER)
    await reward.close()


async def test_a_scorer_gets_the_messages_of_the_row_unless_an_environment_begins_with_its_own():
    row = replace(make_prompt(7), messages=({"role": "user", "content": "1+1="},))
    begun = row.read_as([*row.tokens, 3], TOKENIZER)
    asked: list[list[str]] = []

    async def note(request: pb.ScoreRequest) -> None:
        asked.append([message.content for message in request.messages])

    async with serving(servicer=FaultyServicer({row.prompt_id: note})) as address, running() as make:
        reward = make(address, EXACT)
        await reward.open("run")
        episode = Episode([0], [1], [0.0], "tools 1")
        for prompt in (row, begun):
            await reward.score(replace(GROUP, prompt=prompt, episodes=[episode]), TOKENIZER)
    assert asked == [["1+1="], []]
