"""What runs agents: the interface, and the agents that are called once for each episode. command.py runs programs.

An agent that is elsewhere calls the policy at an endpoint that listens beside the reward service, with its certificate.
The key of the episode alone says who it is.
"""

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from services.common.config.environment import AgentEnvironmentConfig
from services.common.config.reward import RemoteConfig, is_local
from services.common.rpc.tls import CERTIFICATE_FILE, KEY_FILE, Credentials, Identity, is_address
from services.reward.environments.workers import EpisodePool
from services.reward.errors import EnvironmentFailure, EpisodeError, ScoringError
from services.reward.remote import Remote
from services.reward.sandboxed.agent import ENDED

_OF_FUNCTIONS = "services.reward.environments.executor:AgentExecutor"
_MAX_CONCURRENT = 1024  # POSTs to an agent's URL


@dataclass(frozen=True)
class Played:
    """What an agent left behind."""

    exit_code: int
    text: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    errors: str = ""
    """The end of a command's standard error."""


@dataclass(frozen=True)
class Part:
    """One episode for an agent: the row, and where it reaches the model."""

    episode_id: str
    seed: int
    row: Mapping[str, object]
    key: str
    serve: Callable[[socket.socket], Awaitable[None]]
    """Answers the calls of this episode, and of no other, at a socket that listens."""
    url: str
    """Where the host's loopback or the network leads to the episode of `key`; empty for agents with such a socket."""


class Runner:
    """Runs agents of one config, many at the same time."""

    version: str
    """Text that changes whenever the agent could behave otherwise."""

    async def open(self) -> None:
        """Starts what agents need. Raises EpisodeError if it cannot start."""

    def isolate(self, episode_id: str) -> None:
        """Is called before an episode that may hang or crash, and must then hurt no other episode."""

    async def run(self, part: Part) -> Played:
        """Runs the agent until it ends. Raises EpisodeError if it fails. None of it is left when this is canceled."""
        raise NotImplementedError

    def end(self, episode_id: str) -> None:
        """Makes the agent of an episode end now; `run` then returns what it has left behind."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends all agents."""


class CalledRunner(Runner):
    """Runs agents that are called once for each episode, and answer with their final text."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[str]] = {}

    async def call(self, part: Part) -> str:
        """Returns the final text. Is canceled if the episode ends before. Raises EpisodeError if the agent fails."""
        raise NotImplementedError

    async def run(self, part: Part) -> Played:
        call = self._running[part.episode_id] = asyncio.create_task(self.call(part))
        try:
            await asyncio.wait({call})
            return Played(ENDED, "") if call.cancelled() else Played(0, call.result())
        finally:
            del self._running[part.episode_id]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def end(self, episode_id: str) -> None:
        if call := self._running.get(episode_id):
            call.cancel()


class FunctionRunner(CalledRunner):
    """Runs `environment.path`, a function of the user, in worker processes that can be killed."""

    def __init__(self, config: AgentEnvironmentConfig):
        super().__init__()
        self._workers = EpisodePool(
            config, {"path": config.path}, "services.reward.environments.executor:AgentExecutor"
        )

    async def open(self) -> None:
        await self._workers.open()
        self.version = self._workers.version

    def isolate(self, episode_id: str) -> None:
        self._workers.isolate(episode_id)

    async def call(self, part: Part) -> str:
        fields = {"row": part.row, "seed": part.seed, "url": part.url, "key": part.key}
        try:
            return (await self._workers.begin(part.episode_id, {"call": "play", "fields": fields}))["text"]
        finally:
            await asyncio.shield(self._workers.end(part.episode_id))

    async def close(self) -> None:
        await self._workers.close()


@dataclass(frozen=True)
class Place:
    """Where the reward service listens, and with which credentials."""

    host: str = "127.0.0.1"
    tls: Credentials | None = None


class Site:
    """Where the endpoint listens for agents with a URL: with TLS if the reward service has a certificate.

    Raises:
        EpisodeError: The agent of the config could not reach it.
    """

    def __init__(self, config: AgentEnvironmentConfig, place: Place):
        self.port, self._tls = config.port, place.tls
        agent = urlsplit(config.url).hostname or ""
        if not is_local(agent) and (place.tls is None or is_local(place.host)):
            raise EpisodeError(
                EnvironmentFailure.REFUSED,
                f"an agent on another host ({agent}) calls the reward service with TLS: start it with --tls and with "
                "--listen of an address that the agent can reach",
            )
        self.host, self._name = "127.0.0.1", "127.0.0.1"
        self.context: ssl.SSLContext | None = None
        if self._tls:
            self.host, self._served = place.host, self._tls.current()
            self._name = _name(place.host, self._served, is_far=not is_local(agent))
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._load(self.context, self._tls)

    def renew(self) -> None:
        """Serves the newest certificate from the next connection on."""
        if self._tls and self.context and self._tls.current() is not self._served:
            self._served = self._tls.current()
            self._load(self.context, self._tls)

    def url(self, port: int) -> str:
        name = f"[{self._name}]" if ":" in self._name else self._name
        return f"{'https' if self.context else 'http'}://{name}:{port}"

    def _load(self, context: ssl.SSLContext, tls: Credentials) -> None:
        context.load_cert_chain(tls.directory / CERTIFICATE_FILE, tls.directory / KEY_FILE)


def _name(host: str, identity: Identity, *, is_far: bool) -> str:
    """Returns the name by which agents call: one that the certificate is valid for, rather than one of this host."""
    names = sorted(identity.hosts, key=lambda name: (name != host, is_local(name), is_address(name)))
    names = [name for name in names if "*" not in name and not (is_far and is_local(name))]
    if not names:
        detail = "the reward service's certificate names no host that an agent could call: issue one with --host"
        raise EpisodeError(EnvironmentFailure.REFUSED, detail)
    return names[0]


class UrlRunner(CalledRunner):
    """Runs agents that are elsewhere: each episode is a POST to `environment.url`, whose answer is the agent's end."""

    def __init__(self, config: AgentEnvironmentConfig, place: Place):
        super().__init__()
        self._url = config.url
        self.version = hashlib.sha256(config.url.encode()).hexdigest()[:12]
        settings = RemoteConfig(
            url=config.url, max_retries=0, max_concurrent=min(config.max_concurrent, _MAX_CONCURRENT)
        )
        context = ssl.create_default_context()
        if place.tls:  # agents may have certificates of the run's own authority
            context.load_verify_locations(cadata=place.tls.current().ca.decode())
        self._remote = Remote(settings, 2 * config.episode_s, context=context)  # the servicer's limit comes first

    async def open(self) -> None:
        await self._remote.open()

    async def call(self, part: Part) -> str:
        fields = {"url": part.url, "key": part.key, "row": part.row, "seed": part.seed}
        try:
            answer = await self._remote.post(fields)
        except ScoringError as error:
            raise EpisodeError(EnvironmentFailure.CRASHED, error.detail) from error
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            detail = f"{self._url}: the answer must be a JSON object with the final text as `text`: {answer!r:.200}"
            raise EpisodeError(EnvironmentFailure.INVALID_REPLY, detail)
        return answer["text"]

    async def close(self) -> None:
        await self._remote.close()
