"""Runs agents that are elsewhere: each episode is a POST to their URL, and the answer to it is the agent's end.

They call the policy at an endpoint that listens beside the reward service, with its certificate. The key of the episode
alone says who they are.
"""

import hashlib
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from services.common.config.environment import AgentEnvironmentConfig
from services.common.config.reward import RemoteConfig, is_local
from services.common.rpc.tls import CERTIFICATE_FILE, KEY_FILE, Credentials, Identity, is_address
from services.reward.agents.base import CalledRunner, Part
from services.reward.errors import EnvironmentFailure, EpisodeError, ScoringError
from services.reward.remote import Remote

_MAX_CONCURRENT = 1024


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
    """Runs `environment.url`."""

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
