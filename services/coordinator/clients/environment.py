"""Calls the environments. Spreads episodes over the reward services and gives failures one type."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from enum import StrEnum
from typing import TypeVar

from lockstep.reward.v1 import agent_pb2, agent_pb2_grpc, environment_pb2_grpc
from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.reward.v1.agent_pb2_grpc import AgentServiceServicer as AgentService
from lockstep.reward.v1.environment_pb2_grpc import EnvironmentServiceServicer as EnvironmentService
from lockstep.types.v1.types_pb2 import FinishReason

from services.common.config.environment import AgentEnvironmentConfig, BaseEnvironmentConfig, EnvironmentConfig
from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, LockstepError, PreconditionFailed, Reason, Unavailable
from services.common.rpc.client import Client, Method, Request
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import gather, keep, task_group
from services.coordinator.clients.reward import Reward, Rewards
from services.coordinator.data.prompts import Prompt

log = logging.getLogger(__name__)

# The service limits each reply itself. The call may take this much longer.
_MARGIN_S = 30.0
# A worker that was lost may have to start before a reset, which does not count toward the reply's limit.
_START_S = 60.0


class EnvironmentFailure(StrEnum):
    """Why an episode failed, which was not the policy's fault. Metrics count it under this word."""

    TIMEOUT = "timeout"
    CRASHED = "crashed"
    REFUSED = "refused"
    INVALID_REPLY = "invalid_reply"
    NEIGHBOR = "neighbor"
    """Its worker process ended, and another episode may have ended it."""
    SET_ASIDE = "set_aside"
    """It hung again, in a worker process of its own. It is not played again in this step or evaluation."""
    LOST = "lost"
    """The reward service was lost or restarted, and its episodes with it."""
    OVERLONG = "overlong"
    """The first messages make the prompt longer than data.max_prompt_tokens; it is not played again."""
    UNSPECIFIED = "unspecified"
    """The reward service named no reason, or one that this coordinator does not know."""


_PREFIX = "ENVIRONMENT_FAILURE_REASON_"
_FAILURES = {
    number: EnvironmentFailure(name.removeprefix(_PREFIX).lower())
    for name, number in pb.EnvironmentFailureReason.items()
}


class EpisodeFailed(LockstepError):
    """The environment failed. The episode can be played again, with the same seeds.

    `alone` says that it hung in a worker process that others shared, or ended it.
    """

    default_reason = Reason.ENVIRONMENT_FAILED

    def __init__(self, failure: EnvironmentFailure, message: str, *, alone: bool = False):
        super().__init__(f"environment: {failure.value}: {message}")
        self.failure, self.detail, self.alone = failure, message, alone


def row_of(prompt: Prompt) -> dict[str, object]:
    """Returns the row of a prompt as an environment gets it."""
    answer = {} if prompt.answer is None else {"answer": prompt.answer}
    return {**prompt.extra, "prompt": prompt.row_prompt, **answer}


class EpisodeClient:
    """Calls the environment of one reward service about one episode."""

    def __init__(self, service: "_Service", episode_id: str, settings: BaseEnvironmentConfig):
        self._service, self._settings, self._reply_s = service, settings, settings.longest_reply_s
        self._began_s = 0.0
        self._ids = {"run_id": service.reward.run_id, "episode_id": episode_id}
        self._num_turns = 0
        self.environment = service.reward.opened.environment

    async def reset(self, seed: int, prompt: Prompt, *, alone: bool = False) -> Sequence[pb.Message]:
        """Begins the episode, `alone` in a worker process of its own. Returns the messages that follow the prompt.

        Raises:
            EpisodeFailed: The environment failed.
        """
        request = pb.ResetRequest(**self._ids, seed=seed, row_json=json.dumps(row_of(prompt)), alone=alone)
        self._began_s = time.monotonic()
        limit_s = self._settings.episode_s if alone else self._reply_s + _START_S  # it may wait for others to end
        return (await self._service.call(EnvironmentService.Reset, request, limit_s)).messages

    async def step(
        self, text: str, num_tokens: int, finish_reason: FinishReason, *, is_reasoning: bool = False
    ) -> pb.StepResponse:
        """Sends the policy's next turn to the environment. Returns its reply.

        `is_reasoning`: whether the turn's prompt ended within reasoning.

        Raises:
            EpisodeFailed: The environment failed.
        """
        turn = {"turn": self._num_turns, "text": text, "num_tokens": num_tokens}
        request = pb.StepRequest(**self._ids, **turn, finish_reason=finish_reason, is_reasoning=is_reasoning)
        try:
            answer = await self._service.call(EnvironmentService.Step, request, self._reply_s)
        except EpisodeFailed as error:
            # Not if the service itself was lost: to wait until it is back may take longer than an episode may.
            is_unknown = (
                isinstance(error.__cause__, LockstepError) and error.__cause__.reason is Reason.EPISODE_NOT_OPEN
            )
            if is_unknown and time.monotonic() - self._began_s >= self._settings.episode_s:
                raise EpisodeFailed(EnvironmentFailure.TIMEOUT, error.detail) from error  # the service has ended it
            raise
        self._num_turns += 1
        return answer

    async def close(self) -> None:
        """Ends the episode. If that fails, its lease ends it, or it was lost with its service."""
        try:
            timeout_s = self._settings.turn_s + _MARGIN_S
            await self._service.client.call(EnvironmentService.Close, pb.CloseRequest(**self._ids), timeout_s=timeout_s)
        except LockstepError as error:
            log.info("episode %s is left to its lease: %s", self._ids["episode_id"], error.message)


Answer = Callable[[agent_pb2.AgentCall], Awaitable[agent_pb2.CallAnswer]]


class Environments:
    """Plays each episode on the reward service that has the fewest open episodes."""

    def __init__(self, rewards: Rewards, settings: EnvironmentConfig, transport: Transport = LOCAL):
        """Creates the clients. The reward services must be open."""
        self._services = [_Service(reward, settings, transport) for reward in rewards.services]
        self._settings = settings
        self._ends: set[asyncio.Task[None]] = set()
        opened = rewards.opened
        self.tools: Sequence[Mapping[str, object]] = json.loads(opened.tools_json or "[]")
        """JSON schemas of the tools, as chat templates take them."""
        self.roles = tuple(opened.roles)
        """Roles of the messages that the environment may send."""
        self.name = opened.environment

    @asynccontextmanager
    async def episode(self, episode_id: str) -> AsyncIterator[EpisodeClient]:
        """Yields the client of a new episode, which ends afterwards; nobody waits for its end."""
        assert isinstance(self._settings, BaseEnvironmentConfig), "agents have no client of an episode"
        with self._least_loaded() as service:
            await service.places.acquire()
            client = EpisodeClient(service, episode_id, self._settings)
            try:
                yield client
            finally:
                end = keep(self._ends, client.close())
                # Only then, because max_concurrent is a limit of the service.
                end.add_done_callback(lambda _: service.places.release())

    async def play(self, begin: agent_pb2.Begin, answer: Answer) -> agent_pb2.AgentEnd:
        """Plays an agent's episode, answers its calls and returns what it left behind.

        A call that is in progress when the agent ends still gets its answer: whether it is trained must not depend on
        how long it takes.

        Raises:
            EpisodeFailed: The agent failed.
        """
        assert isinstance(self._settings, AgentEnvironmentConfig), "the run has an agent"
        limit_s = self._settings.episode_s + _START_S + _MARGIN_S
        with self._least_loaded() as service:
            async with service.places, task_group() as tasks:
                # The group ends when the calls in progress have their answers, also if the agent has ended before.
                last = await service.play(begin, answer, tasks, limit_s)
        if last.HasField("failure"):  # only now, because an error would cancel the calls in progress
            raise episode_failed(last.failure)
        return last.end

    @contextmanager
    def _least_loaded(self) -> Iterator["_Service"]:
        service = min(self._services, key=lambda service: service.num_episodes)
        service.num_episodes += 1
        try:
            yield service
        finally:
            service.num_episodes -= 1

    async def close(self) -> None:
        await asyncio.gather(*self._ends)
        await gather(service.client.close() for service in self._services)


@asynccontextmanager
async def open_environments(
    rewards: Rewards, config: Config, transport: Transport = LOCAL
) -> AsyncIterator[Environments | None]:
    """Yields the environments of the reward services, which are open; None if the run has no environment."""
    if config.environment is None:
        yield None
        return
    environments = Environments(rewards, config.environment, transport)
    try:
        yield environments
    finally:
        await environments.close()


_Reply = TypeVar("_Reply", pb.ResetResponse, pb.StepResponse)


class _Service:
    def __init__(self, reward: Reward, settings: EnvironmentConfig, transport: Transport):
        self.reward = reward
        is_agent = isinstance(settings, AgentEnvironmentConfig)
        stub = agent_pb2_grpc.AgentServiceStub if is_agent else environment_pb2_grpc.EnvironmentServiceStub
        self.client = Client(reward.address, stub, transport)
        self.num_episodes = 0
        self.places = asyncio.Semaphore(settings.max_concurrent)

    async def call(self, method: Method[Request, _Reply], request: Request, reply_s: float) -> _Reply:
        async with self._reopening_if_lost():
            answer = await self.client.call(method, request, timeout_s=reply_s + _MARGIN_S)
        if answer.HasField("failure"):
            raise episode_failed(answer.failure)
        return answer

    async def play(
        self, begin: agent_pb2.Begin, answer: Answer, tasks: asyncio.TaskGroup, limit_s: float
    ) -> agent_pb2.PlayResponse:
        begin.run_id = self.reward.run_id
        sent: asyncio.Queue[agent_pb2.PlayRequest] = asyncio.Queue()
        sent.put_nowait(agent_pb2.PlayRequest(begin=begin))

        async def requests() -> AsyncIterator[agent_pb2.PlayRequest]:
            while True:
                yield await sent.get()

        async def reply(call: agent_pb2.AgentCall) -> None:
            sent.put_nowait(agent_pb2.PlayRequest(answer=await answer(call)))

        async with (
            self._reopening_if_lost(),
            aclosing(self.client.stream(AgentService.Play, requests(), timeout_s=limit_s)) as responses,
        ):
            async for response in responses:
                if not response.HasField("call"):
                    return response
                tasks.create_task(reply(response.call))
        raise EpisodeFailed(EnvironmentFailure.LOST, "the stream ended before the agent")

    @asynccontextmanager
    async def _reopening_if_lost(self) -> AsyncIterator[None]:
        """Raises EpisodeFailed if the service is lost in the block, once it is open again."""
        num_opens = self.reward.num_opens
        try:
            yield
        except (Unavailable, DeadlineExceeded, PreconditionFailed) as error:
            if error.reason not in (Reason.UNREACHABLE, Reason.DEADLINE, Reason.RUN_NOT_OPEN, Reason.EPISODE_NOT_OPEN):
                raise
            if error.reason is Reason.RUN_NOT_OPEN or isinstance(error, Unavailable):
                await self.reward.reopen(num_opens, why=error.message)
            raise EpisodeFailed(EnvironmentFailure.LOST, error.message) from error


def episode_failed(failure: pb.EnvironmentFailure) -> EpisodeFailed:
    """Returns the error of a failure that a service has answered."""
    reason = _FAILURES.get(failure.reason, EnvironmentFailure.UNSPECIFIED)
    return EpisodeFailed(reason, failure.message, alone=failure.alone)
