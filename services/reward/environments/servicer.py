"""Implements the gRPC service lockstep.reward.v1.EnvironmentService."""

import errno
import json

from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.reward.v1 import environment_pb2_grpc, reward_pb2

from services.common.config.environment import EnvironmentConfig, EnvironmentSection
from services.common.config.load import parse_json
from services.common.errors import InvalidInput, Overloaded, PreconditionFailed, Reason
from services.common.rpc.fence import Fence
from services.common.rpc.server import Context
from services.reward.environments.base import Turn
from services.reward.environments.episode import EpisodeContext
from services.reward.environments.kinds import make_environment
from services.reward.environments.table import EpisodeTable
from services.reward.errors import EpisodeError
from services.reward.metrics import RewardMetrics
from services.reward.requests import finish_reason, parse_object, require_run

NAME = "lockstep.reward.v1.EnvironmentService"
# The host is at fault, not the config.
_OF_HOST = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}


def parse_environment(section_json: str) -> EnvironmentConfig | None:
    """Returns the environment section of the config; None if it is empty.

    Raises:
        InvalidInput: It does not fit the schema.
    """
    return parse_json(EnvironmentSection, section_json, field="environment_json").root if section_json else None


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Plays the episodes of the run that RewardServicer has opened. A failure of the environment is no RPC error."""

    def __init__(self, metrics: RewardMetrics, fence: Fence):
        self._metrics, self._fence = metrics, fence
        self._run_id = ""
        self._table: EpisodeTable | None = None

    async def open(self, run_id: str, config: EnvironmentConfig | None) -> reward_pb2.OpenRunResponse:
        """Starts the environment, if there is one, and returns what the coordinator must know about it.

        Raises:
            InvalidInput: The environment cannot start.
            Overloaded: The host has too few descriptors, processes or too little memory for it.
        """
        if config is None:
            self._run_id = run_id
            return reward_pb2.OpenRunResponse()
        environment = make_environment(config)
        try:
            await environment.open()
        except BaseException as error:  # cancellation too: no process may be left running
            await environment.close()
            if not isinstance(error, EpisodeError):
                raise
            message = f"environment ({config.kind}) cannot start: {error.detail}"
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _OF_HOST:
                raise Overloaded(f"{message}; raise this limit of the host, then run the same command again") from error
            raise InvalidInput(message, reason=Reason.INVALID_CONFIG, field="environment") from error
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
        """Ends all episodes and the environment of the open run."""
        table, self._table, self._run_id = self._table, None, ""
        if table:
            await table.close()

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        """Begins an episode, or repeats the answer.

        Raises:
            PreconditionFailed: The run or its environment is not open, or the episode began with another row.
            InvalidInput: The request is malformed.
        """
        table = self._table_for(request.run_id)
        if not request.episode_id:
            raise InvalidInput("episode_id: must not be empty", field="episode_id")
        return await table.reset(request, parse_object(request.row_json, field="row_json"))

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        """Plays one turn, or repeats the answer to the last one.

        Raises:
            PreconditionFailed: The run is not open; EPISODE_NOT_OPEN; or the turn is out of order.
            InvalidInput: The request is malformed.
        """
        table = self._table_for(request.run_id)
        is_truncated = finish_reason(request.finish_reason, field="finish_reason") == "length"
        turn = Turn(request.text, request.num_tokens, is_truncated, request.is_reasoning)
        return await table.step(request, turn)

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        """Ends an episode; does nothing if it is not open.

        Raises:
            PreconditionFailed: The run is not open.
        """
        await self._table_for(request.run_id).end(request.episode_id)
        return pb.CloseResponse()

    def _table_for(self, run_id: str) -> EpisodeTable:
        self._fence.require()
        require_run(run_id, self._run_id)
        if self._table is None:
            raise PreconditionFailed(f"run {run_id} was opened without an environment")
        return self._table
