"""Plays one episode: one call at a time, each applied once, and one end whatever happens."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from lockstep.reward.v1 import environment_pb2 as pb

from services.common.errors import PreconditionFailed
from services.reward.environments import messages
from services.reward.environments.base import Environment, EnvironmentFailure, EpisodeError, Turn
from services.reward.metrics import RewardMetrics

log = logging.getLogger(__name__)

Request = pb.ResetRequest | pb.StepRequest
Response = pb.ResetResponse | pb.StepResponse


@dataclass(frozen=True)
class Stage:
    """Holds what all episodes of an environment share."""

    environment: Environment
    turn_s: float
    """Time limit in seconds for one reply, and for the environment's end of an episode."""
    metrics: RewardMetrics


class Episode:
    """Remembers the last call and its answer, also while it is in progress and after the episode has ended.

    The environment's part ends with the first of: done, a failure, `end`. The memory stays until the table drops it.
    """

    def __init__(self, key: str, stage: Stage):
        self._key, self._stage = key, stage
        self._request: Request | None = None
        self._answer: asyncio.Task[Response] | None = None
        self._playing: asyncio.Task[Response] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stopped: EpisodeError | None = None
        stage.metrics.count_episodes(1)

    @property
    def has_stepped(self) -> bool:
        """Whether the last call is a step."""
        return isinstance(self._request, pb.StepRequest)

    async def reset(self, request: pb.ResetRequest, row: dict[str, object]) -> pb.ResetResponse:
        """Begins the episode, or repeats the answer if it is the request that began it.

        Raises:
            PreconditionFailed: It began with another seed or row.
        """
        if self._request is None:
            self._start(request, lambda: self._reset(request.seed, row), pb.ResetResponse)
        return await self._repeat(request)

    async def step(self, request: pb.StepRequest, turn: Turn) -> pb.StepResponse:
        """Applies the next turn, or repeats the answer if it is the turn that was applied last.

        Raises:
            PreconditionFailed: The turn is neither, or it is the last with another text, or the episode is over.
        """
        last = self._request.turn if isinstance(self._request, pb.StepRequest) else -1
        if request.turn == last + 1:
            self._require_free()
            self._start(request, lambda: self._step(turn), pb.StepResponse)
        elif request.turn != last:
            raise PreconditionFailed(f"turn {request.turn} of an episode whose last turn is {last}")
        return await self._repeat(request)

    async def end(self, reason: EnvironmentFailure, detail: str) -> None:
        """Ends the episode; a call in progress fails with the reason. Returns when the environment has ended it."""
        self._stopped = self._stopped or EpisodeError(reason, detail)
        self._begin_end()
        assert self._ending, "just begun"
        await asyncio.shield(self._ending)

    def _require_free(self) -> None:
        assert self._answer, "an episode begins with its reset"
        if not self._answer.done():
            raise PreconditionFailed("the episode's call before this one is still in progress")
        if self._ending:
            raise PreconditionFailed("the episode is over: its environment said so, or failed")

    def _start(
        self,
        request: Request,
        play: Callable[[], Awaitable[Response]],
        response: type[pb.ResetResponse] | type[pb.StepResponse],
    ) -> None:
        self._request = request
        self._answer = asyncio.create_task(self._limited(play, response))

    async def _repeat(self, request: Request) -> Response:
        if request != self._request:
            raise PreconditionFailed("this turn of the episode was played with another content")
        assert self._answer, "made with the request"
        # Whoever gives up leaves the call running: a repeat finds its answer.
        return await asyncio.shield(self._answer)

    async def _limited(self, play, response) -> Response:
        call: Literal["reset", "step"] = "reset" if response is pb.ResetResponse else "step"
        began = time.monotonic()
        self._playing = asyncio.ensure_future(play())
        try:
            answer = await self._outcome(self._playing)
            if isinstance(answer, pb.StepResponse) and answer.done:
                self._begin_end()
            return answer
        except EpisodeError as error:
            self._stage.metrics.count_environment_failure(error.reason)
            log.warning("episode %s: %s", self._key, error)
            self._begin_end()
            return response(failure=messages.failure(error))
        finally:
            self._stage.metrics.observe_environment(call, time.monotonic() - began)

    async def _outcome(self, playing: asyncio.Task[Response]) -> Response:
        """Returns the environment's response. Does not wait for it to react to a cancellation.

        Raises:
            EpisodeError: It failed, exceeded its time limit, or the episode was ended.
        """
        await asyncio.wait({playing}, timeout=self._stage.turn_s)
        if not playing.done():
            detail = f"no reply within {self._stage.turn_s:g} s (environment.turn_s)"
            raise EpisodeError(EnvironmentFailure.TIMEOUT, detail)
        if self._stopped:
            raise self._stopped
        try:
            return playing.result()
        except EpisodeError:
            raise
        except Exception as error:
            log.exception("episode %s: the environment failed", self._key)
            raise EpisodeError(EnvironmentFailure.CRASHED, f"{type(error).__name__}: {error}") from error

    async def _reset(self, seed: int, row: dict[str, object]) -> pb.ResetResponse:
        environment = self._stage.environment
        return messages.reset_response(await environment.reset(self._key, seed, row), environment.roles)

    async def _step(self, turn: Turn) -> pb.StepResponse:
        environment = self._stage.environment
        return messages.step_response(await environment.step(self._key, turn), environment.roles)

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        try:
            if self._playing and not self._playing.done():
                self._playing.cancel()
                await asyncio.wait({self._playing})
            async with asyncio.timeout(self._stage.turn_s):
                await self._stage.environment.end(self._key)
        except TimeoutError:
            log.warning("episode %s did not end within %g s", self._key, self._stage.turn_s)
        except Exception as error:  # noqa: BLE001 whatever it is, the episode is over and the others go on
            log.warning("episode %s did not end well: %s: %s", self._key, type(error).__name__, error)
        finally:
            self._stage.metrics.count_episodes(-1)
