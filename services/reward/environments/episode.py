"""Plays one episode: applies its calls one by one, each of them once, ends it exactly once, and checks replies."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from lockstep.reward.v1 import environment_pb2 as pb

from services.common.errors import PreconditionFailed
from services.reward.environments.base import CLOCK, Clock, Environment, Message, Reply, Turn
from services.reward.environments.executor import invalid_reply
from services.reward.errors import EnvironmentFailure, EpisodeError, Tracebacks
from services.reward.metrics import RewardMetrics

log = logging.getLogger(__name__)


def _step_response(reply: Reply, roles: Sequence[str]) -> pb.StepResponse:
    """Raises EpisodeError INVALID_REPLY if the reply is malformed or its reward is not finite."""
    if type(reply.done) is not bool:
        raise invalid_reply(f"done must be true or false, not {reply.done!r}")
    if type(reply.reward) not in (float, int) or not math.isfinite(reply.reward):
        raise invalid_reply(f"a reward must be a finite number, not {reply.reward!r}")
    return pb.StepResponse(
        messages=_messages(reply.messages, roles),
        reward=reply.reward,
        done=reply.done,
        tool_calls=[
            pb.ToolCall(name=call.name, arguments_json=json.dumps(call.arguments)) for call in reply.tool_calls
        ],
        num_calls=len(reply.outcomes),
        num_failed_calls=sum(outcome != "ok" for outcome in reply.outcomes),
    )


def _messages(messages: Sequence[Message], roles: Sequence[str]) -> list[pb.Message]:
    for message in messages:
        if message.role and message.role not in roles:
            raise invalid_reply(f"a message's role must be one of `roles`, {', '.join(roles)}, not {message.role!r}")
    try:
        return [pb.Message(role=m.role, content=m.content, name=m.name) for m in messages]
    except (TypeError, ValueError) as error:  # not text, or half of a surrogate pair
        raise invalid_reply(f"a message is not text: {error}") from error


def report_failure(
    episode: str, error: EpisodeError, metrics: RewardMetrics, tracebacks: Tracebacks
) -> pb.EnvironmentFailure:
    """Logs and counts the failure of an episode. Returns it as a message."""
    log.warning("episode %s: %s%s", episode, error, tracebacks.once(error.traceback))
    metrics.environment_failures.labels(error.reason.lower()).inc()
    return failure_message(error)


def failure_message(error: EpisodeError) -> pb.EnvironmentFailure:
    detail, reason = error.detail.encode(errors="replace").decode(), f"ENVIRONMENT_FAILURE_REASON_{error.reason}"
    return pb.EnvironmentFailure(reason=reason, message=detail, alone=error.alone)


# How long a call that exceeded its time limit may take to find out who is at fault.
_SETTLE_S = 10.0
_MAX_SHOWN = 300  # characters of the policy's text in an error

Played = TypeVar("Played")
Response = TypeVar("Response", pb.ResetResponse, pb.StepResponse)


class Call(Generic[Response]):
    """A request and its answer, which may be in progress."""

    def __init__(self, request: pb.ResetRequest | pb.StepRequest, answer: Awaitable[Response]):
        self.request, self.answer = request, asyncio.ensure_future(answer)

    async def repeat(self, request: pb.ResetRequest | pb.StepRequest) -> Response:
        if request != self.request:
            raise PreconditionFailed("this turn of the episode was played with other content")
        # If a caller gives up, the call runs on, so that a repeated request finds its answer.
        return await asyncio.shield(self.answer)


@dataclass(frozen=True)
class EpisodeContext:
    """The objects and limits that all episodes of an environment share."""

    environment: Environment
    turn_s: float  # for one reply (see base.Clock), and for the environment's end of an episode
    metrics: RewardMetrics
    tracebacks: Tracebacks = field(default_factory=Tracebacks)


class Episode:
    """Remembers the last call and its answer, also while it is in progress and after the episode has ended.

    The environment's part ends with the first of: done, a failure, `end`. The memory stays until the table drops it.
    """

    def __init__(self, key: str, context: EpisodeContext):
        self._key, self._context = key, context
        self._reset: Call[pb.ResetResponse] | None = None
        self._step: Call[pb.StepResponse] | None = None
        self.last_turn = -1
        self._playing: asyncio.Task[object] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stopped: EpisodeError | None = None
        context.metrics.episodes.inc()

    async def reset(self, request: pb.ResetRequest, row: dict[str, object]) -> pb.ResetResponse:
        """Raises PreconditionFailed if the episode began with another seed or row."""
        if self._reset is None:
            self._reset = Call(request, self._play_reset(request, row))
        return await self._reset.repeat(request)

    async def step(self, request: pb.StepRequest, turn: Turn) -> pb.StepResponse:
        """Applies the next turn or repeats the answer to the last one. Raises PreconditionFailed for another turn."""
        if request.turn == self.last_turn + 1:
            last = self._step or self._reset
            assert last, "an episode begins with its reset"
            if not last.answer.done():
                raise PreconditionFailed("the episode's call before this one is still in progress")
            if self._ending:
                raise PreconditionFailed("the episode is over: its environment said so, or failed")
            self._step, self.last_turn = Call(request, self._play_step(turn)), request.turn
        elif self._step is None or request.turn != self.last_turn:
            raise PreconditionFailed(f"turn {request.turn} of an episode whose last turn is {self.last_turn}")
        return await self._step.repeat(request)

    async def end(self, reason: EnvironmentFailure, detail: str) -> None:
        """Ends the episode; a call in progress fails with the reason. Returns when the environment has ended it."""
        self._stopped = self._stopped or EpisodeError(reason, detail)
        await asyncio.shield(self._begin_end())

    async def _play_reset(self, request: pb.ResetRequest, row: dict[str, object]) -> pb.ResetResponse:
        environment = self._context.environment
        if request.alone:
            environment.isolate(self._key)
        try:
            first = await self._play_in_time("reset", environment.reset(self._key, request.seed, row))
            return pb.ResetResponse(messages=_messages(first, environment.roles))
        except EpisodeError as error:
            return pb.ResetResponse(failure=self._fail(error))

    async def _play_step(self, turn: Turn) -> pb.StepResponse:
        environment = self._context.environment
        try:
            reply = await self._play_in_time("step", environment.step(self._key, turn), to=turn.text)
            response = _step_response(reply, environment.roles)
            for outcome in reply.outcomes:
                self._context.metrics.tool_calls.labels(outcome).inc()
        except EpisodeError as error:
            return pb.StepResponse(failure=self._fail(error))
        if response.done:
            self._begin_end()
        return response

    def _fail(self, error: EpisodeError) -> pb.EnvironmentFailure:
        self._begin_end()
        return report_failure(self._key, error, self._context.metrics, self._context.tracebacks)

    async def _play_in_time(
        self, call: Literal["reset", "step"], play: Coroutine[object, object, Played], to: str = ""
    ) -> Played:
        """Returns the environment's reply `to` a text."""
        began, clock = time.monotonic(), Clock(self._context.turn_s)
        # The clock is in a context of its own, because the environment's tasks must find theirs, not each other's.
        context = copy_context()
        context.run(CLOCK.set, clock)
        self._playing = playing = asyncio.create_task(play, context=context)
        await asyncio.wait({playing, clock.expired}, return_when=asyncio.FIRST_COMPLETED)
        clock.close()
        self._context.metrics.environment_seconds.labels(call).observe(time.monotonic() - began)
        if not playing.done() and not self._stopped:
            playing.cancel()
            await asyncio.wait({playing}, timeout=_SETTLE_S)
            raise self._stopped or self._timeout(call, to)
        if self._stopped:
            raise self._stopped
        try:
            return playing.result()
        except EpisodeError:
            raise
        except Exception as error:
            log.exception("episode %s: the environment failed", self._key)
            raise EpisodeError(EnvironmentFailure.CRASHED, f"{type(error).__name__}: {error}") from error

    def _timeout(self, call: str, to: str) -> EpisodeError:
        """Returns the failure of a canceled call, which names the text that it should have answered."""
        fault = self._context.environment.fault(self._key)
        if fault and fault.reason is EnvironmentFailure.NEIGHBOR:
            return fault
        detail = f"no reply within {self._context.turn_s:g} s (environment.turn_s): {call}"
        if to:
            detail += f" of {to!r}" if len(to) <= _MAX_SHOWN else f" of {to[:_MAX_SHOWN]!r}..."
        return EpisodeError(EnvironmentFailure.TIMEOUT, detail, alone=bool(fault and fault.alone))

    def _begin_end(self) -> asyncio.Task[None]:
        self._ending = self._ending or asyncio.create_task(self._end())
        return self._ending

    async def _end(self) -> None:
        try:
            if self._playing and not self._playing.done():
                self._playing.cancel()
                await asyncio.wait({self._playing})
            async with asyncio.timeout(self._context.turn_s):
                await self._context.environment.end(self._key)
        except TimeoutError:
            log.warning("episode %s did not end within %g s", self._key, self._context.turn_s)
        except Exception as error:  # noqa: BLE001 the episode is over in any case, and the others go on
            log.warning("episode %s did not end well: %s: %s", self._key, type(error).__name__, error)
        finally:
            self._context.metrics.episodes.dec()
