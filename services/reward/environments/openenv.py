"""Plays environments of an OpenEnv server (openenv-core 0.3, openenv 0.10), over its WebSocket protocol.

-> {"type": "reset", "data": {"seed": 7, "episode_id": "..."}}
<- {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
-> {"type": "step", "data": {"message": "..."}}                 answered in the same way
-> {"type": "close"}                                            the server closes the connection
<- {"type": "error", "data": {"message": "...", "code": "CAPACITY_REACHED"}}
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence

import aiohttp

from services.common.config.environment import OpenEnvEnvironmentConfig
from services.common.json_values import JsonMapping
from services.reward.environments.base import Environment, Message, Reply, Turn, off_the_clock
from services.reward.errors import EnvironmentFailure, EpisodeError

MAX_ANSWER_BYTES = 4 << 20
_CLOSE_S = 5.0  # that the server may take to answer the end of a connection
# Codes with which a server refuses an episode, rather than reports a failure.
_REFUSED = ("CAPACITY_REACHED", "VALIDATION_ERROR", "UNKNOWN_TYPE", "INVALID_JSON")
_MAX_DETAIL_CHARS = 500
_NUM_SEEDS = 2**31  # servers pass seeds to numpy and others, which take no larger ones


class OpenEnvironment(Environment):
    """Plays each episode on a connection of its own, which is a session of the server's.

    The protocol has no version of the environment, so a server that was changed needs a new run.
    """

    version = "2"

    def __init__(self, config: OpenEnvEnvironmentConfig):
        self._config = config
        self._place = config.url.partition("?")[0]  # without what may be a key
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._connections: dict[str, Connection] = {}

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        try:
            async with asyncio.timeout(self._config.turn_s):
                await (await self._connect()).close()
        except TimeoutError:
            raise _failed(EnvironmentFailure.TIMEOUT, f"{self._place} does not answer") from None

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        with off_the_clock():
            await self._slots.acquire()
        try:
            connection = await self._connect()
        except BaseException:
            self._slots.release()
            raise
        self._connections[episode_id] = connection
        data = {"seed": seed % _NUM_SEEDS, "episode_id": episode_id}
        message, _, done = self._read(await connection.ask({"type": "reset", "data": data}))
        if done:
            raise _failed(EnvironmentFailure.INVALID_REPLY, "the episode is done with its reset")
        return [message]

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        action = {self._config.action_field: turn.answer(self._config.reasoning_tags)}
        answer = await self._connections[episode_id].ask({"type": "step", "data": action})
        message, reward, done = self._read(answer)
        return Reply([message], reward, done)

    async def end(self, episode_id: str) -> None:
        if connection := self._connections.pop(episode_id, None):
            try:
                await connection.close()
            finally:
                self._slots.release()

    async def close(self) -> None:
        if self._session:
            await asyncio.gather(*(self.end(episode_id) for episode_id in list(self._connections)))
            await self._session.close()

    async def _connect(self) -> "Connection":
        if self._session is None or self._session.closed:
            raise _failed(EnvironmentFailure.CRASHED, "the run was closed")
        timeout = aiohttp.ClientWSTimeout(ws_close=_CLOSE_S)  # pyright: ignore[reportCallIssue] made by attrs
        try:
            socket = await self._session.ws_connect(self._config.url, timeout=timeout, max_msg_size=MAX_ANSWER_BYTES)
            return Connection(socket)
        except (aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__} {error}"
            if isinstance(error, aiohttp.WSServerHandshakeError):  # whose text has the whole URL
                why = f"status {error.status}; the WebSocket of an OpenEnv server is at /ws"
            detail = f"no connection to {self._place}: {why}"
            raise _failed(EnvironmentFailure.CRASHED, detail) from error

    def _read(self, data: JsonMapping) -> tuple[Message, float, bool]:
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise _failed(EnvironmentFailure.INVALID_REPLY, f"no observation and done: {data!r}")
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise _failed(EnvironmentFailure.INVALID_REPLY, f"a reward must be a finite number, not {reward!r}")
        # Metadata is not for the policy, and may have the answer. Servers since openenv 0.10 send it.
        shown: object = {key: value for key, value in observation.items() if key != "metadata"}
        if field := self._config.observation_field:
            if field not in observation:
                detail = f"the observation has no {field}, but {', '.join(observation)}"
                raise _failed(EnvironmentFailure.INVALID_REPLY, detail)
            shown = observation[field]
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        return Message("user", text), float(reward or 0.0), done


class Connection:
    """Reads all the time. Only a read answers pings, without which servers end a connection while the policy thinks."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._reading = asyncio.create_task(socket.receive())

    async def ask(self, message: Mapping[str, object]) -> JsonMapping:
        with contextlib.suppress(aiohttp.ClientError, OSError):  # what is read says how the connection ended
            await self._socket.send_str(json.dumps(message))
        answer = await self._reading
        self._reading = asyncio.create_task(self._socket.receive())
        if answer.type is aiohttp.WSMsgType.ERROR:
            raise _failed(EnvironmentFailure.INVALID_REPLY, f"the answer is not a WebSocket message: {answer.data}")
        if answer.type is not aiohttp.WSMsgType.TEXT:
            code = self._socket.close_code
            reason = EnvironmentFailure.INVALID_REPLY if code == 1009 else EnvironmentFailure.CRASHED
            raise _failed(reason, f"the server ended the connection ({answer.type.name} {code})")
        return _parse(answer.data)

    async def close(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.send_str('{"type": "close"}')
        await self._socket.close()


def _parse(answer: str) -> JsonMapping:
    try:
        content = json.loads(answer)
        kind, data = content["type"], content["data"]
        if kind == "observation" and isinstance(data, dict):
            return data
        code, detail = data["code"], f"{data['message']} {data.get('errors', '')}".strip()  # errors name the fields
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        detail = f"neither an observation nor an error: {answer}"
        raise _failed(EnvironmentFailure.INVALID_REPLY, detail) from error
    reason = EnvironmentFailure.REFUSED if code in _REFUSED else EnvironmentFailure.CRASHED
    if code == "CAPACITY_REACHED":
        detail += " Set environment.max_concurrent to what it takes (its max_concurrent_envs)."
    raise _failed(reason, f"the server says {code}: {detail}")


def _failed(reason: EnvironmentFailure, detail: str) -> EpisodeError:
    return EpisodeError(reason, detail[:_MAX_DETAIL_CHARS])
