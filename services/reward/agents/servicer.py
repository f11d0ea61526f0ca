"""The gRPC service lockstep.reward.v1.AgentService: plays the episodes of agents."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from lockstep.reward.v1 import agent_pb2 as pb
from lockstep.reward.v1 import agent_pb2_grpc
from lockstep.reward.v1.reward_pb2 import OpenRunResponse

from services.common.config.environment import AgentEnvironmentConfig
from services.common.errors import InvalidInput, counted
from services.common.rpc.fence import Fence
from services.common.rpc.server import Context
from services.common.tasks import keep
from services.reward.agents.command import CommandRunner
from services.reward.agents.dialect import Drops
from services.reward.agents.endpoint import Endpoint, Line
from services.reward.agents.runners import FunctionRunner, Part, Place, Played, Runner, Site, UrlRunner
from services.reward.environments.episode import failure_message, report_failure
from services.reward.environments.servicer import cannot_start, parse_object, require_run
from services.reward.errors import EnvironmentFailure, EpisodeError, Tracebacks
from services.reward.metrics import RewardMetrics

log = logging.getLogger(__name__)

NAME = "lockstep.reward.v1.AgentService"


class _Episode:
    """One stream: passes calls out and answers in, and keeps the clock once a limit of the config was reached."""

    def __init__(self, runner: Runner, begin: pb.Begin, grace_s: float):
        self._runner, self._begin, self._grace_s = runner, begin, grace_s
        self.calls: asyncio.Queue[pb.AgentCall] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[pb.CallAnswer]] = {}
        self._grace: asyncio.TimerHandle | None = None
        self.at_limit = False
        """Whether the last call was refused because of a limit, which is an outcome and no failure of the agent."""

    async def ask(self, call: pb.AgentCall) -> pb.CallAnswer:
        answer = self._answers[call.number] = asyncio.get_running_loop().create_future()
        self.calls.put_nowait(call)
        return await answer

    async def read(self, requests: AsyncIterator[pb.PlayRequest]) -> None:
        """Takes answers until the stream ends. Raises InvalidInput for anything else."""
        async for request in requests:
            said, loop = request.answer, asyncio.get_running_loop()
            if request.WhichOneof("part") != "answer" or said.call not in self._answers:
                raise InvalidInput("answer: must be that of a call in progress", field="answer")
            if said.is_over and self._grace is None:
                self._grace = loop.call_later(self._grace_s, self._runner.end, self._begin.episode_id)
            self.at_limit = self._grace is not None or said.refusal_code == "context_length_exceeded"
            answer = self._answers.pop(said.call)
            if not answer.done():
                answer.set_result(said)

    def close(self) -> None:
        if self._grace:
            self._grace.cancel()


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """Plays the episodes of the run that RewardServicer has opened. A failure of the agent is no RPC error."""

    def __init__(self, metrics: RewardMetrics, fence: Fence, place: Place | None = None):
        self._metrics, self._fence, self._place = metrics, fence, place or Place()
        self._run_id = ""
        self._config = AgentEnvironmentConfig(command=("none",))
        self._runner: Runner | None = None
        self._endpoint: Endpoint | None = None
        self._playing: set[asyncio.Task[Played]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._tracebacks = Tracebacks()

    async def open(self, run_id: str, config: AgentEnvironmentConfig) -> OpenRunResponse:
        """Starts what agents need, and returns what the coordinator must know. Raises InvalidInput if it cannot."""
        kind = CommandRunner if config.command else FunctionRunner
        runner: Runner = UrlRunner(config, self._place) if config.url else kind(config)
        endpoint = Endpoint(Drops(config.drop_tools, config.drop_fields))
        try:
            await runner.open()
            if not config.command:
                await endpoint.open_port(Site(config, self._place) if config.url else None)
        except BaseException as error:  # cancellation too: no process may be left running
            await runner.close()
            await endpoint.close()
            if not isinstance(error, EpisodeError):
                raise
            raise cannot_start("agent", error) from error
        self._run_id, self._config, self._runner, self._endpoint = run_id, config, runner, endpoint
        return OpenRunResponse(environment=f"agent 1/{runner.version}")

    def end_episodes(self) -> None:
        """Ends all episodes. What runs agents stays open."""
        for playing in self._playing:
            playing.cancel()

    async def end(self) -> None:
        runner, endpoint, self._runner, self._run_id = self._runner, self._endpoint, None, ""
        self.end_episodes()
        await asyncio.gather(*self._playing, *self._ending, return_exceptions=True)
        if runner and endpoint:
            await endpoint.close()
            await runner.close()

    async def Play(
        self, request_iterator: AsyncIterator[pb.PlayRequest], context: Context
    ) -> AsyncGenerator[pb.PlayResponse, None]:
        """Plays one episode. The end of the stream ends the agent.

        Raises:
            InvalidInput: The first message does not begin an episode, or a later one answers no call.
            PreconditionFailed: RUN_NOT_OPEN, RUN_REPLACED or SCORER_CHANGED.
        """
        requests = aiter(request_iterator)
        begin = (await anext(requests, pb.PlayRequest())).begin
        require_run(self._fence, begin.run_id, self._run_id)
        if not begin.episode_id:
            raise InvalidInput("begin: must be the first message, with an episode_id", field="begin")
        async with contextlib.aclosing(self.play(begin, requests)) as responses:
            async for response in responses:
                yield response

    async def play(
        self, begin: pb.Begin, requests: AsyncIterator[pb.PlayRequest]
    ) -> AsyncGenerator[pb.PlayResponse, None]:
        """Does what Play does after the first message. There must be an open agent."""
        assert self._runner and self._endpoint, "it is open"
        episode = _Episode(self._runner, begin, self._config.grace_s)
        line = self._endpoint.begin(episode.ask, begin.max_model_len)
        playing = keep(self._playing, self._run(self._runner, begin, line))
        reading = asyncio.create_task(episode.read(requests))
        self._metrics.episodes.inc()
        try:
            async for call in _calls_until_end(playing, reading, episode.calls):
                yield pb.PlayResponse(call=call)
            yield self._end_message(begin, playing, line, at_limit=episode.at_limit)
        finally:
            # A caller cancels the call as soon as it has the last message; nothing may be left even so.
            ending = self._end_episode(self._endpoint, episode, line, {playing, reading})
            await asyncio.shield(keep(self._ending, ending))

    async def _end_episode(
        self, endpoint: Endpoint, episode: _Episode, line: Line, tasks: set[asyncio.Task[object]]
    ) -> None:
        self._metrics.episodes.dec()
        episode.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await endpoint.end(line)

    async def _run(self, runner: Runner, begin: pb.Begin, line: Line) -> Played:
        if begin.alone:
            runner.isolate(begin.episode_id)
        row = parse_object(begin.row_json, field="row_json")
        assert self._endpoint, "it is open"
        serve, url = partial(self._endpoint.serve, line), self._endpoint.url
        part = Part(begin.episode_id, begin.seed, row, line.key, serve, url)
        try:
            async with asyncio.timeout(self._config.episode_s):
                return await runner.run(part)
        except TimeoutError as error:
            detail = f"the episode took longer than {self._config.episode_s:g} s (environment.episode_s)"
            raise EpisodeError(EnvironmentFailure.TIMEOUT, detail) from error

    def _end_message(
        self, begin: pb.Begin, playing: asyncio.Task[Played], line: Line, *, at_limit: bool
    ) -> pb.PlayResponse:
        """Returns the last message: the end of the agent, or its failure."""
        try:
            played = playing.result()
        except asyncio.CancelledError:
            error = EpisodeError(
                EnvironmentFailure.CRASHED, "the run was closed, or another coordinator goes on with it"
            )
        except EpisodeError as failed:
            error = _with_refusal(failed, line)
            is_of_function = bool(self._config.path) and error.reason is EnvironmentFailure.CRASHED and not error.alone
            if at_limit and is_of_function:  # the coordinator tells this outcome by the same rule
                log.info("episode %s: the agent ended as a limit refused its call: %s", begin.episode_id, error.detail)
                return pb.PlayResponse(failure=failure_message(error))
        else:
            _log_exit(begin.episode_id, played, at_limit=at_limit)
            end = pb.AgentEnd(exit_code=played.exit_code, files=played.files, num_retries=line.num_retries)
            end.num_refused, end.refusal, end.errors = line.num_refused, line.refusal, played.errors
            end.text = played.text.encode(errors="replace").decode()
            return pb.PlayResponse(end=end)
        return pb.PlayResponse(failure=report_failure(begin.episode_id, error, self._metrics, self._tracebacks))


def _log_exit(episode_id: str, played: Played, *, at_limit: bool) -> None:
    if played.exit_code:
        # A signal is mostly the service's own. At a limit, the last line has the error of the agent's client.
        level = logging.WARNING if played.exit_code > 0 and not at_limit else logging.INFO
        said = played.errors.strip().rpartition("\n")[2] if at_limit else played.errors
        log.log(level, "episode %s: the agent ended with exit code %d: %s", episode_id, played.exit_code, said)


def _with_refusal(error: EpisodeError, line: Line) -> EpisodeError:
    """Returns the failure of an agent with why its last request was refused, which may be the cause."""
    if not line.refusal or line.refusal in error.detail:
        return error
    refused = f"the endpoint had refused {counted(line.num_refused, 'request')}, the last because: {line.refusal}"
    return EpisodeError(error.reason, f"{error.detail}; {refused}", error.traceback, alone=error.alone)


async def _calls_until_end(
    playing: asyncio.Task[Played], reading: asyncio.Task[None], calls: asyncio.Queue[pb.AgentCall]
) -> AsyncGenerator[pb.AgentCall, None]:
    """Yields calls until the agent has ended. Raises the error of `reading`."""
    while not playing.done():
        next_call = asyncio.create_task(calls.get())
        try:
            waiting = {playing, next_call} | ({reading} if not reading.done() else set())
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            if next_call.done():
                yield next_call.result()
        finally:
            next_call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await next_call
