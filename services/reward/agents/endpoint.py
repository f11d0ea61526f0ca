"""The HTTP endpoint that agents call in place of a provider's.

A whole answer is generated before any of it is written, streams too: clients take a stream that is cut off for a whole
answer. The end of an episode, a limit and a bad request are all status 400, because clients repeat others.
"""

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from aiohttp.http import HttpProcessingError
from lockstep.reward.v1.agent_pb2 import AgentCall, CallAnswer

from services.common.rpc.channel import HANDSHAKE_MS, max_connections
from services.reward.agents.anthropic import CountTokens, Messages
from services.reward.agents.dialect import Dialect, Drops, Refusal, Request
from services.reward.agents.openai import Chat, Responses, write_model
from services.reward.agents.runners import Site
from services.reward.errors import EnvironmentFailure, EpisodeError

_MAX_BODY_BYTES = 8 << 20
# Of one episode, so that one that floods leaves memory and descriptors to the others.
_MAX_WAITING, _MAX_BYTES, _MAX_CONNECTIONS = 128, 32 << 20, 256
_STRANGER_S = HANDSHAKE_MS / 1000  # that a connection may take until a request on it has a key
_KEEP_ALIVE_S = 10.0
_CLOSE_S = 0.1  # that a request that was begun has to end; aiohttp takes 0 for no limit
_NAME_LENGTH = 32  # of an episode, in its key
_BEARER = re.compile("^bearer +", re.IGNORECASE)
_MAX_SHOWN = 300  # characters of a refusal, for logs
_MAX_SMALL_BYTES = 1 << 16  # of a body that is read on the event loop, where all episodes wait for it
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": CountTokens(),
    "/v1/responses": Responses(),
}

_log = logging.getLogger(__name__)
# An agent may send as much as it likes of what is no HTTP, and leave as often as it likes before it has its answer.
_OF_AGENTS = (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _OF_AGENTS)))

Ask = Callable[[AgentCall], Awaitable[CallAnswer]]
Key = tuple[str, str]
"""The path of a request, and the SHA-256 of its body."""
_RETRY_COUNT = "x-stainless-retry-count"  # which the clients of OpenAI and Anthropic send


@dataclass
class _Asked:
    """A call whose answer was not fully written."""

    key: Key
    answering: asyncio.Future[CallAnswer]
    is_open: Callable[[], bool]
    """Says whether the connection of the last request for it is open."""

    def has(self, answer: CallAnswer) -> bool:
        done = self.answering.done() and not (self.answering.cancelled() or self.answering.exception())
        return done and self.answering.result() is answer


class Line:
    """The calls of one episode. `ask` sends a call and returns its answer.

    A request with an equal body to an equal path is a retry as long as the earlier one's answer is not fully written:
    an agent may ask the same again on purpose once it has an answer. Most clients do not mark retries. One that is
    marked as none is a retry only of a call whose connection is gone: what is above the client repeats requests too.
    """

    def __init__(self, ask: Ask, key: str, max_model_len: int):
        self.key, self.max_model_len = key, max_model_len
        self.num_retries = self.num_refused = self._num_bytes = 0
        self.refusal = ""
        """Why the endpoint has refused the last of `num_refused` requests."""
        self._ask, self._numbers = ask, itertools.count()
        self._waiting: list[_Asked] = []
        self._is_over = False

    @contextlib.asynccontextmanager
    async def body(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """Yields the body of a request, which is in progress until the context exits. Raises Refusal."""
        parts, size = list[bytes](), 0
        if (request.content_length or 0) > _MAX_BODY_BYTES:
            raise _too_large()
        if (encoding := request.headers.get("Content-Encoding", "identity")).lower() != "identity":
            raise Refusal(f"Content-Encoding: {encoding:.50} is not supported, only identity", status=415)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async for part in request.content.iter_any():
                size, self._num_bytes = size + len(part), self._num_bytes + len(part)
                if size > _MAX_BODY_BYTES:
                    raise _too_large()
                if self._num_bytes > _MAX_BYTES:
                    raise Refusal(f"{_MAX_BYTES} bytes of requests of this episode are in progress", status=429)
                parts.append(part)
        except web.RequestPayloadError as error:
            raise Refusal(f"the body cannot be read: {error}") from error
        else:
            yield b"".join(parts)
        finally:
            self._num_bytes -= size

    async def answer(
        self, asked_for: Request, key: Key, is_open: Callable[[], bool], *, is_first: bool = False
    ) -> CallAnswer:
        """Returns the answer to a request, and keeps it for retries until `delivered`. Raises Refusal.

        `is_first` says that the client has marked the request as no retry.
        """
        if self._is_over:
            raise _episode_over()
        equal = [asked for asked in self._waiting if asked.key == key]
        left = [asked for asked in equal if not asked.is_open()]
        if repeated := left or ([] if is_first else equal):
            asked = repeated[0]
            asked.is_open = is_open
            self.num_retries += 1
        elif not self._has_room():
            raise Refusal(f"{_MAX_WAITING} calls of this episode are in progress", status=429)
        else:
            call = AgentCall(
                number=next(self._numbers),
                request_json=json.dumps(asked_for.neutral),
                body_sha256=key[1],
                overridden=asked_for.overridden,
                counts=asked_for.counts,
            )
            asked = _Asked(key, asyncio.ensure_future(self._ask(call)), is_open)
            self._waiting.append(asked)
        try:
            answer = await asyncio.shield(asked.answering)
        except asyncio.CancelledError:
            if asked.answering.cancelled():
                raise _episode_over() from None
            raise
        if answer.refusal:
            self.delivered(answer)
            raise Refusal(answer.refusal, code=answer.refusal_code)
        return answer

    def _has_room(self) -> bool:
        """Forgets, if there are too many calls, the oldest answer that no client has come back for."""
        is_full = len(self._waiting) >= _MAX_WAITING
        left = (asked for asked in self._waiting if asked.answering.done() and not asked.is_open())
        if is_full and (oldest := next(left, None)):
            self._waiting.remove(oldest)
        return len(self._waiting) < _MAX_WAITING

    def delivered(self, answer: CallAnswer) -> None:
        """Says that an answer to a request was fully written."""
        self._waiting = [asked for asked in self._waiting if not asked.has(answer)]

    def note(self, refusal: Refusal) -> None:
        """Counts a refusal, unless the coordinator has counted it, or the episode is over: those have a code."""
        if refusal.status != 400 or not refusal.code:
            # The agent has written a part of it, and it is for logs.
            said = (c if c.isprintable() else " " for c in refusal.message[:_MAX_SHOWN])
            self.num_refused, self.refusal = self.num_refused + 1, "".join(said)

    def close(self) -> None:
        """Refuses all calls from now on."""
        self._is_over = True
        for asked in self._waiting:
            asked.answering.cancel()


def _is_open(request: web.BaseRequest) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _key_of(request: web.BaseRequest) -> str:
    said = request.headers
    return _BEARER.sub("", said.get("Authorization", "")) or said.get("x-api-key", "")


def _episode_over() -> Refusal:
    why = "its agent has ended, or environment.episode_s or grace_s was over"
    return Refusal(f"the episode is over: {why}", code="episode_over")


def _too_large() -> Refusal:
    return Refusal(f"the body has more than {_MAX_BODY_BYTES} bytes", status=413)


class _Server(web.Server):
    """Speaks HTTP at a listening socket. Drops connections when it has `most`, and those that stay strangers."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], most: int):
        # A small body could be decompressed to one that keeps all episodes waiting.
        super().__init__(handler, access_log=None, logger=_log, auto_decompress=False)
        self._most = most
        self._strangers = dict[web.RequestHandler, asyncio.TimerHandle]()

    async def open(self, listening: socket.socket, context: ssl.SSLContext | None = None) -> None:
        self._listening = await asyncio.get_running_loop().create_server(
            self, sock=listening, ssl=context, ssl_handshake_timeout=_STRANGER_S if context else None
        )

    async def close(self) -> None:
        self._listening.close()
        self.pre_shutdown()  # ends connections between two requests
        await self.shutdown(_CLOSE_S)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._most:
            asyncio.get_running_loop().call_soon(transport.abort)  # the handler must have begun
        self._strangers[handler] = asyncio.get_running_loop().call_later(_STRANGER_S, transport.abort)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self.know(handler)
        super().connection_lost(handler, exc)

    def know(self, handler: web.RequestHandler) -> None:
        """Lets a connection stay."""
        if timer := self._strangers.pop(handler, None):
            timer.cancel()


class Endpoint:
    """Serves the lines of all episodes: on a port and, of those in sandboxes, each at its own socket."""

    def __init__(self, drops: Drops):
        self._drops = drops
        self._lines: dict[str, Line] = {}
        self._servers: dict[str, _Server] = {}
        self._secret, self._site = os.urandom(32), None
        self.port, self.url = 0, ""

    async def open_port(self, site: Site | None = None) -> None:
        """Opens a port at a site, or on the host's loopback, where the key alone tells the episode.

        Raises:
            EpisodeError: The site has no such port.
        """
        host, port = (site.host, site.port) if site else ("127.0.0.1", 0)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            detail = f"the endpoint for agents cannot listen on {host}:{port}: {error}"
            raise EpisodeError(EnvironmentFailure.REFUSED, detail) from error
        self.port, self._site = listening.getsockname()[1], site
        self.url = site.url(self.port) if site else f"http://127.0.0.1:{self.port}"
        server = self._servers[""] = _Server(partial(self._handle, None), max_connections())
        await server.open(listening, site.context if site else None)

    async def close(self) -> None:
        for line in list(self._lines.values()):
            await self.end(line)
        for server in self._servers.values():
            await server.close()

    def begin(self, ask: Ask, max_model_len: int) -> Line:
        if self._site:
            self._site.renew()
        name = os.urandom(_NAME_LENGTH // 2).hex()
        line = Line(ask, name + self._mac(name), max_model_len)
        self._lines[line.key] = line
        return line

    async def serve(self, line: Line, listening: socket.socket) -> None:
        """Serves a line at a socket that only its sandbox can reach, and closes the socket at the end of the line."""
        server = self._servers[line.key] = _Server(partial(self._handle, line), _MAX_CONNECTIONS)
        await server.open(listening)

    async def end(self, line: Line) -> None:
        """Ends the line of an episode. Calls that are in progress get refusals."""
        line.close()
        self._lines.pop(line.key, None)
        if server := self._servers.pop(line.key, None):
            await server.close()

    async def _handle(self, own: Line | None, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request at the socket of a line or, if `own` is None, at the port."""
        if request.method == "HEAD":
            return web.Response()
        dialect = _DIALECTS.get(request.path) if request.method == "POST" else None
        try:
            if dialect:
                return await self._call(request, dialect, self._line_of(request, own))
            if request.method == "GET" and f"{request.path}/".startswith("/v1/models/"):
                model = write_model(self._line_of(request, own).max_model_len)
                is_list = request.path.removesuffix("/") == "/v1/models"  # else one, which calls may name as they like
                return web.json_response({"object": "list", "data": [model]} if is_list else model)
            message = f"{request.method} {request.path}: there are {', '.join(_DIALECTS)} and /v1/models"
            raise Refusal(message, status=404)
        except Refusal as refusal:
            if line := own or self._lines.get(_key_of(request)):
                line.note(refusal)
            headers = {"Retry-After": "1"} if refusal.status == 429 else {}
            return web.json_response((dialect or Chat()).error(refusal), status=refusal.status, headers=headers)

    def _line_of(self, request: web.BaseRequest, own: Line | None) -> Line:
        given = _key_of(request)
        name, signed = given[:_NAME_LENGTH], given[_NAME_LENGTH:].encode(errors="replace")
        line = self._lines.get(given)
        if not hmac.compare_digest(self._mac(name).encode(), signed) or own not in (None, line):
            raise Refusal("the API key is not that of an episode", status=401, code="invalid_api_key")
        if line is None:
            raise _episode_over()
        self._servers[line.key if own else ""].know(request.protocol)
        return line

    def _mac(self, name: str) -> str:
        """Returns the second part of a key, by which it is known as one of this service, also after its episode."""
        return hmac.new(self._secret, name.encode(errors="replace"), "sha256").hexdigest()

    async def _call(self, request: web.BaseRequest, dialect: Dialect, line: Line) -> web.StreamResponse:
        async with line.body(request) as body:
            read = partial(dialect.read, body, self._drops)
            asked_for = read() if len(body) <= _MAX_SMALL_BYTES else await asyncio.to_thread(read)
            key = request.path, hashlib.sha256(body).hexdigest()
            is_first = request.headers.get(_RETRY_COUNT) == "0"
            answering = asyncio.create_task(line.answer(asked_for, key, partial(_is_open, request), is_first=is_first))
            if asked_for.streams:
                response = await self._stream(request, asked_for, answering)
            else:
                response = web.json_response(dialect.answer(await answering))
                await response.prepare(request)
                await response.write_eof()
        if not answering.exception():
            line.delivered(answering.result())
        return response

    async def _stream(
        self, request: web.BaseRequest, asked_for: Request, answering: asyncio.Task[CallAnswer]
    ) -> web.StreamResponse:
        """Answers with a stream, of which the beginning is sent early only to keep the connection alive."""
        dialect = _DIALECTS[request.path]
        await asyncio.wait({answering}, timeout=_KEEP_ALIVE_S)
        if answering.done():
            answering.result()  # a refusal can still have its status
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not answering.done():
            await response.write(dialect.keep_alive)
            await asyncio.wait({answering}, timeout=_KEEP_ALIVE_S)
        try:
            for event in dialect.stream(answering.result(), asked_for):
                await response.write(event)
        except Refusal as refusal:
            await response.write(dialect.error_event(refusal))
        await response.write_eof()
        return response
