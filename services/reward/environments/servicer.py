"""The gRPC service lockstep.reward.v1.EnvironmentService, with its kinds of environments and its open episodes."""

import asyncio
import errno
import itertools
import json
from collections.abc import Callable, Mapping

from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.reward.v1 import environment_pb2_grpc, reward_pb2
from lockstep.types.v1 import types_pb2

from services.common.config.environment import EnvironmentConfig
from services.common.errors import InvalidInput, LockstepError, Overloaded, PreconditionFailed, Reason
from services.common.rpc.fence import Fence
from services.common.rpc.server import Context
from services.common.tasks import keep
from services.reward.environments.base import Environment, Turn
from services.reward.environments.episode import Episode, EpisodeContext
from services.reward.environments.openenv import OpenEnvironment
from services.reward.environments.tools import ToolsEnvironment
from services.reward.environments.workers import python, reasoning_gym, textarena
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.metrics import RewardMetrics

KINDS: Mapping[str, Callable[..., Environment]] = {
    "python": python,
    "tools": ToolsEnvironment,
    "textarena": textarena,
    "reasoning_gym": reasoning_gym,
    "openenv": OpenEnvironment,
}
"""Maps each kind to the function that makes its environment from its config."""


class EpisodeTable:
    """The episodes by id. A timer ends each of them `episode_s` seconds after its reset."""

    def __init__(self, context: EpisodeContext, episode_s: float):
        self._context, self._episode_s = context, episode_s
        self._episodes: dict[str, Episode] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()
        # An id can be played again after its end, which the environment may still be busy with.
        self._numbers = itertools.count()

    async def reset(self, request: pb.ResetRequest, row: dict[str, object]) -> pb.ResetResponse:
        """Begins an episode. If it already has steps, its caller was restarted, and the episode begins again."""
        episode = self._episodes.get(request.episode_id)
        if episode and episode.last_turn >= 0:
            self._drop(request.episode_id, EnvironmentFailure.CRASHED, "the episode began anew")
            episode = None
        return await (episode or self._add(request.episode_id)).reset(request, row)

    async def step(self, request: pb.StepRequest, turn: Turn) -> pb.StepResponse:
        episode = self._episodes.get(request.episode_id)
        if episode is None:
            message = (
                f"episode {request.episode_id} is not open: it was closed, its time limit of {self._episode_s:g} s "
                "(environment.episode_s) is over, or the service was restarted"
            )
            raise PreconditionFailed(message, reason=Reason.EPISODE_NOT_OPEN, episode_id=request.episode_id)
        return await episode.step(request, turn)

    async def end(self, episode_id: str) -> None:
        """Ends and forgets an episode; does nothing if there is none."""
        if ending := self._drop(episode_id, EnvironmentFailure.CRASHED, "the episode was closed"):
            await asyncio.shield(ending)

    def end_all(self, why: str) -> None:
        for episode_id in list(self._episodes):
            self._drop(episode_id, EnvironmentFailure.CRASHED, why)

    async def close(self) -> None:
        self.end_all("the run was closed")
        await asyncio.gather(*self._ending)
        await self._context.environment.close()

    def _add(self, episode_id: str) -> Episode:
        episode = Episode(f"{episode_id}/{next(self._numbers)}", self._context)
        self._episodes[episode_id] = episode
        detail = f"the episode took longer than {self._episode_s:g} s (environment.episode_s)"
        lease = (episode_id, EnvironmentFailure.TIMEOUT, detail)
        self._leases[episode_id] = asyncio.get_running_loop().call_later(self._episode_s, self._drop, *lease)
        return episode

    def _drop(self, episode_id: str, reason: EnvironmentFailure, detail: str) -> asyncio.Task[None] | None:
        if episode_id not in self._episodes:
            return None
        self._leases.pop(episode_id).cancel()
        return keep(self._ending, self._episodes.pop(episode_id).end(reason, detail))


_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TURN_LIMIT: "turn_limit",
}


def require_run(fence: Fence, run_id: str, opened_run_id: str) -> None:
    """Checks that the caller has run `run_id` open.

    A coordinator whose calls move from one replica of the service to another has opened no run on the second, which may
    still hold an earlier one. It is told to open its run, which takes the replica over.

    Raises:
        PreconditionFailed: RUN_NOT_OPEN; RUN_REPLACED, another coordinator has opened a run since; SCORER_CHANGED,
            another run than the caller's is open.
    """
    if opened_run_id and not fence.knows_caller:
        message = f"run {opened_run_id} is open, and the caller has opened none on this service: call OpenRun first"
        raise PreconditionFailed(message, reason=Reason.RUN_NOT_OPEN)
    fence.require()
    if not opened_run_id:
        raise PreconditionFailed("no run is open: call OpenRun first", reason=Reason.RUN_NOT_OPEN)
    if run_id != opened_run_id:
        message = (
            f"run {opened_run_id} opened its scorers on this service after run {run_id}: give each run its own "
            "reward service and start the earlier run again; it resumes"
        )
        raise PreconditionFailed(message, reason=Reason.SCORER_CHANGED)


def parse_object(text: str, *, field: str) -> dict[str, object]:
    """Returns a JSON object, by default an empty one. Raises InvalidInput, which names `field`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field}: not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{field}: must be an object, not a {type(value).__name__}", field=field)
    return value


def finish_reason(reason: types_pb2.FinishReason, *, field: str) -> str:
    """Raises InvalidInput, which names `field`, if it is no reason with which a sample ends."""
    if reason not in _FINISH_REASONS:
        raise InvalidInput(f"{field}: {reason} is not STOP, LENGTH or TURN_LIMIT", field=field)
    return _FINISH_REASONS[reason]


NAME = "lockstep.reward.v1.EnvironmentService"
# The host is at fault, not the config.
_OF_HOST = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}


def cannot_start(kind: str, error: EpisodeError) -> LockstepError:
    """Returns the error of an environment of this kind that failed as it was opened."""
    message = f"environment ({kind}) cannot start: {error.detail}"
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in _OF_HOST:
        return Overloaded(f"{message}; raise this limit of the host, then run the same command again")
    return InvalidInput(message, reason=Reason.INVALID_CONFIG, field="environment")


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Plays the episodes of the run that RewardServicer has opened. A failure of the environment is no RPC error."""

    def __init__(self, metrics: RewardMetrics, fence: Fence):
        self._metrics, self._fence = metrics, fence
        self._run_id = ""
        self._table: EpisodeTable | None = None

    async def open(self, run_id: str, config: EnvironmentConfig | None) -> reward_pb2.OpenRunResponse:
        """Starts the environment, if there is one, and returns what the coordinator must know about it."""
        if config is None:
            self._run_id = run_id
            return reward_pb2.OpenRunResponse()
        assert config.kind != "agent", "agents have a service of their own"
        environment = KINDS[config.kind](config)
        try:
            await environment.open()
        except BaseException as error:  # cancellation too: no process may be left running
            await environment.close()
            if not isinstance(error, EpisodeError):
                raise
            raise cannot_start(config.kind, error) from error
        self._run_id = run_id
        self._table = EpisodeTable(EpisodeContext(environment, config.turn_s, self._metrics), config.episode_s)
        return reward_pb2.OpenRunResponse(
            environment=f"{config.kind} {environment.version}",
            tools_json=json.dumps(environment.tools) if environment.tools else "",
            roles=environment.roles,
        )

    def end_episodes(self) -> None:
        """Begins to end all episodes. The environment stays open."""
        if self._table:
            self._table.end_all("another coordinator goes on with the run")

    async def end(self) -> None:
        table, self._table, self._run_id = self._table, None, ""
        if table:
            await table.close()

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        table = self._table_for(request.run_id)
        if not request.episode_id:
            raise InvalidInput("episode_id: must not be empty", field="episode_id")
        return await table.reset(request, parse_object(request.row_json, field="row_json"))

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        """Plays one turn, or repeats the answer to the last one."""
        table = self._table_for(request.run_id)
        is_truncated = finish_reason(request.finish_reason, field="finish_reason") == "length"
        turn = Turn(request.text, request.num_tokens, is_truncated, request.is_reasoning)
        return await table.step(request, turn)

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        """Does nothing if the episode is not open."""
        await self._table_for(request.run_id).end(request.episode_id)
        return pb.CloseResponse()

    def _table_for(self, run_id: str) -> EpisodeTable:
        require_run(self._fence, run_id, self._run_id)
        if self._table is None:
            raise PreconditionFailed(f"run {run_id} was opened without an environment")
        return self._table
