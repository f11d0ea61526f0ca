"""The HTTP endpoint that agents call in place of a provider's.

A whole answer is generated before any of it is written, streams too: clients take a stream that is cut off for a whole
answer. The end of an episode, a limit and a bad request are all status 400, because clients repeat others.
"""

import asyncio
import hashlib
import hmac
import itertools
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from aiohttp import web
from lockstep.reward.v1.agent_pb2 import AgentCall, CallAnswer

from services.reward.agents.chat import Chat, write_models
from services.reward.agents.dialect import Dialect, Refusal, Request
from services.reward.agents.messages import CountTokens, Messages
from services.reward.agents.remote import Site
from services.reward.agents.responses import Responses
from services.reward.errors import EnvironmentFailure, EpisodeError

_MAX_BODY_BYTES = 8 << 20
_MAX_WAITING = 128  # calls of one episode
_KEEP_ALIVE_S = 10.0
_NAME_LENGTH = 32  # of an episode, in its key
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": CountTokens(),
    "/v1/responses": Responses(),
}

Ask = Callable[[AgentCall], Awaitable[CallAnswer]]
Key = tuple[str, str]
"""The path of a request, and the SHA-256 of its body."""


class Line:
    """The calls of one episode. `ask` sends a call and returns its answer.

    A request with an equal body to an equal path is a retry as long as the earlier one's answer is not fully written.
    Clients do not mark retries, and an agent may ask the same again on purpose once it has an answer.
    """

    def __init__(self, ask: Ask, socket: Path, key: str, max_model_len: int):
        self.key, self.socket, self.max_model_len = key, socket, max_model_len
        self.num_retries = 0
        self._ask, self._numbers = ask, itertools.count()
        self._waiting: dict[Key, asyncio.Future[CallAnswer]] = {}  # until an answer was written as a whole
        self._is_over = False

    async def answer(self, asked_for: Request, key: Key) -> CallAnswer:
        """Returns the answer to a request, and keeps it for retries until `delivered`. Raises Refusal."""
        if self._is_over:
            raise _over()
        answering = self._waiting.get(key)
        if answering:
            self.num_retries += 1
        elif len(self._waiting) >= _MAX_WAITING:
            raise Refusal(f"{_MAX_WAITING} calls of this episode are in progress", status=429)
        else:
            call = AgentCall(
                number=next(self._numbers),
                request_json=json.dumps(asked_for.neutral),
                body_sha256=key[1],
                overridden=asked_for.overridden,
                counts=asked_for.counts,
            )
            answering = self._waiting[key] = asyncio.ensure_future(self._ask(call))
        try:
            answer = await asyncio.shield(answering)
        except asyncio.CancelledError:
            if answering.cancelled():
                raise _over() from None
            raise
        if answer.refusal:
            self._waiting.pop(key, None)
            raise Refusal(answer.refusal, code=answer.refusal_code)
        return answer

    def delivered(self, key: Key) -> None:
        """Says that an answer to a request was fully written."""
        self._waiting.pop(key, None)

    def close(self) -> None:
        """Refuses all calls from now on."""
        self._is_over = True
        for answering in self._waiting.values():
            answering.cancel()


def _over() -> Refusal:
    return Refusal("the episode is over", code="episode_over")


class Endpoint:
    """Serves the lines of all episodes: each on a Unix socket of its own and, with a `site`, all of them there."""

    def __init__(self, drop_tools: Collection[str], site: Site | None):
        self._drop_tools, self._site = frozenset(drop_tools), site
        self._secret = os.urandom(32)
        self._lines: dict[str, Line] = {}
        self._sites: dict[str, web.UnixSite] = {}
        self._numbers = itertools.count()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        for path in _DIALECTS:
            app.router.add_route("POST", path, self._call)
        app.router.add_route("GET", "/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.url = ""
        """The address of the site."""

    async def open(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-agents-")
        Path(self._folder.name).chmod(0o711)
        await self._runner.setup()
        if self._site:
            site = web.TCPSite(self._runner, self._site.host, self._site.port, ssl_context=self._site.context)
            try:
                await site.start()
            except OSError as error:
                detail = f"the endpoint for agents cannot listen on {self._site.host}:{self._site.port}: {error}"
                raise EpisodeError(EnvironmentFailure.REFUSED, detail) from error
            self.url = self._site.url(self._runner.addresses[0][1])

    async def close(self) -> None:
        for line in list(self._lines.values()):
            await self.end(line)
        await self._runner.cleanup()
        if self._folder:
            self._folder.cleanup()

    async def begin(self, ask: Ask, max_model_len: int) -> Line:
        """Opens the line of an episode."""
        assert self._folder, "it is open"
        if self._site:
            self._site.renew()
        path, name = Path(self._folder.name) / str(next(self._numbers)), os.urandom(16).hex()
        line = Line(ask, path, name + self._sign(name), max_model_len)
        site = web.UnixSite(self._runner, path)
        await site.start()
        path.chmod(0o666)  # a sandbox's user is another one; only that sandbox has the socket
        self._lines[line.key], self._sites[line.key] = line, site
        return line

    async def end(self, line: Line) -> None:
        """Closes the line of an episode. Connections that are still open get refusals."""
        line.close()
        if self._lines.pop(line.key, None):
            await self._sites.pop(line.key).stop()
            line.socket.unlink(missing_ok=True)

    def _line_of(self, request: web.Request) -> Line:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        line, name = self._lines.get(given), request.transport.get_extra_info("sockname") if request.transport else None
        at_own_socket = not isinstance(name, str) or (line is not None and name == str(line.socket))
        is_mine = hmac.compare_digest(
            self._sign(given[:_NAME_LENGTH]).encode(), given[_NAME_LENGTH:].encode(errors="replace")
        )
        if not is_mine or not at_own_socket:
            raise Refusal("the API key is not that of an episode", status=401, code="invalid_api_key")
        if line is None:
            raise _over()
        return line

    def _sign(self, name: str) -> str:
        """Returns the second half of a key, by which it is known as one of this service, also after its episode."""
        return hmac.new(self._secret, name.encode(errors="replace"), "sha256").hexdigest()

    async def _call(self, request: web.Request) -> web.StreamResponse:
        dialect = _DIALECTS[request.path]
        try:
            line = self._line_of(request)
            body = await request.read()
            asked_for = dialect.read(body, self._drop_tools)
            key = request.path, hashlib.sha256(body).hexdigest()
            answering = asyncio.create_task(line.answer(asked_for, key))
            if asked_for.streams:
                response = await self._stream(request, asked_for, answering)
            else:
                response = web.json_response(dialect.answer(await answering))
                await response.prepare(request)
                await response.write_eof()
        except web.HTTPRequestEntityTooLarge:
            return _refused(dialect, Refusal(f"the body has more than {_MAX_BODY_BYTES} bytes", status=413))
        except Refusal as refusal:
            return _refused(dialect, refusal)
        line.delivered(key)
        return response

    async def _stream(
        self, request: web.Request, asked_for: Request, answering: asyncio.Task[CallAnswer]
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

    async def _models(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(write_models(self._line_of(request).max_model_len))
        except Refusal as refusal:
            return _refused(Chat(), refusal)

    async def _other(self, request: web.Request) -> web.Response:
        if request.method == "HEAD":
            return web.Response()
        message = f"{request.method} {request.path}: there are {', '.join(_DIALECTS)} and /v1/models"
        return _refused(Chat(), Refusal(message, status=404))


def _refused(dialect: Dialect, refusal: Refusal) -> web.Response:
    headers = {"Retry-After": "1"} if refusal.status == 429 else {}
    return web.json_response(dialect.error(refusal), status=refusal.status, headers=headers)
