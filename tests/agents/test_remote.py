"""Tests agents that are servers elsewhere: they call the policy with a key, over TLS unless they are on this host."""

import asyncio
import contextlib
import errno
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from services.common.config.environment import AgentEnvironmentConfig
from services.common.errors import InvalidInput, Overloaded, Reason
from services.common.rpc.fence import Fence
from services.common.rpc.tls import CA_FILE, Credentials, Role
from services.coordinator.cli import certs
from services.coordinator.clients.environment import EpisodeFailed
from services.reward.agents.command import CommandRunner
from services.reward.agents.runners import Place, Site
from services.reward.agents.servicer import AgentServicer
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.metrics import RewardMetrics
from tests.agents.harness import staged
from tests.agents.test_episodes import everything_sampled_is_trained_once, says
from tests.support import raises, until

Json = dict[str, Any]


@contextlib.asynccontextmanager
async def serving(play: Callable[[Json], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Yields the URL of an agent that answers each POST with `play`."""

    async def handle(request: web.Request) -> web.Response:
        return await play(await request.json())

    app = web.Application()
    app.router.add_post("/episode", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/episode"
    finally:
        await runner.cleanup()


async def ask(url: str, key: str, *messages: Json, trust: ssl.SSLContext | bool = True) -> tuple[int, Json]:
    """Asks the policy. Returns the status and the body of its answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{url}/v1/chat/completions",
            json={"messages": messages},
            headers={"Authorization": f"Bearer {key}"},
            ssl=trust,
        ) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_remote_agent_plays_with_its_key_until_its_episode_ends():
    begun: list[Json] = []

    async def play(episode: Json) -> web.Response:
        begun.append(episode)
        first = {"role": "user", "content": episode["row"]["prompt"]}
        _, said = await ask(episode["url"], episode["key"], first)
        more = said["choices"][0]["message"], {"role": "user", "content": "Sure?"}
        _, said = await ask(episode["url"], episode["key"], first, *more)
        return web.json_response({"text": "4", "reward": 1000})

    async with serving(play) as url, staged(says, url=url) as stage:
        rows = await stage.rows("one", num_samples=2)
        everything_sampled_is_trained_once(stage, rows)
        assert [len(row["turn_begins"]) for row in rows] == [2, 2] and {row["reward"] for row in rows} == {1.0}
        assert [set(one) for one in begun] == [{"url", "key", "row", "seed"}] * 2
        assert begun[0]["row"] == {"prompt": "one"} and begun[0]["seed"] == begun[1]["seed"]
        one, other = begun
        ended = await ask(one["url"], one["key"], {"role": "user", "content": "x"})
        assert (ended[0], ended[1]["error"]["code"]) == (400, "episode_over")
        assert "environment.episode_s" in ended[1]["error"]["message"]
        half = len(one["key"]) // 3
        for key in ("", "x", "\u00e9" * 96, one["key"][:half] + other["key"][half:], one["key"][:-1] + "x"):
            assert (await ask(one["url"], key, {"role": "user", "content": "x"}))[0] == 401
    async with serving(play) as url, staged(says, url=url) as stage:
        await stage.rows("one")
        assert (await ask(begun[-1]["url"], one["key"], {"role": "user", "content": "x"}))[0] == 401, (
            "another run's key"
        )


async def test_an_agent_that_ignores_the_end_loses_its_connection_and_is_scored():
    left = asyncio.Event()

    async def play(episode: Json) -> web.Response:
        try:
            for number in range(3):
                await ask(episode["url"], episode["key"], {"role": "user", "content": f"{number}"})
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            left.set()

    async with serving(play) as url, staged(says, url=url, max_calls=2, grace_s=0.2) as stage:
        group = await stage.play()
        assert group and group.left[0] and (group.left[0].exit_code, group.scores[0].reward) == (-9, 0.0)
        await asyncio.wait_for(left.wait(), 20)


FAILURES: dict[str, tuple[web.Response | None, str]] = {
    "status": (web.Response(status=503, text="busy"), "status 503: busy"),
    "redirect": (web.Response(status=302, headers={"Location": "/"}), "status 302"),
    "text": (web.json_response({"answer": "4"}), "must be a JSON object"),
    "list": (web.json_response([]), "must be a JSON object"),
    "JSON": (web.Response(text="4 it is"), "not JSON"),
    "time": (None, "episode_s"),
}


async def test_whatever_else_it_answers_is_a_failure_and_no_reward():
    answers = iter(FAILURES.values())

    async def play(episode: Json) -> web.Response:
        await ask(episode["url"], episode["key"], {"role": "user", "content": "x"})
        answer, _ = next(answers)
        return answer or await asyncio.Event().wait()  # type: ignore[return-value]

    async with serving(play) as url, staged(says, url=url, episode_s=5.0) as stage:
        for _, why in FAILURES.values():
            with pytest.raises(EpisodeFailed, match=why):
                await stage.play()
        await until(lambda: not stage.servicer.agents._playing)
    async with staged(says, url=url) as stage:
        with pytest.raises(EpisodeFailed, match="Connect"):  # its server is gone
            await stage.play()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "ca"
    certs.init(directory)
    return directory


async def test_the_endpoint_shows_the_newest_certificate_of_the_reward_service(authority: Path, tmp_path: Path):
    own = tmp_path / "own"
    certs.issue(authority, Role.REWARD, ["reward.lab", "127.0.0.1"], own)
    trust = ssl.create_default_context(cafile=str(own / CA_FILE))
    served: list[str] = []

    async def play(episode: Json) -> web.Response:
        url = episode["url"]
        assert url.startswith("https://127.0.0.1:"), "the name at which it listens"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(url, episode["key"], {"role": "user", "content": "x"})
        with pytest.raises(aiohttp.ClientError):
            await ask(url.replace("https", "http"), episode["key"], {"role": "user", "content": "x"})
        assert (await ask(url, "wrong", {"role": "user", "content": "x"}, trust=trust))[0] == 401
        assert (await ask(url, episode["key"], {"role": "user", "content": "x"}, trust=trust))[0] == 200
        host, port = url.removeprefix("https://").split(":")
        served.append(await asyncio.to_thread(ssl.get_server_certificate, (host, int(port))))
        return web.json_response({"text": "4"})

    place = Place("127.0.0.1", Credentials(own))
    async with serving(play) as url, staged(says, url=url, place=place) as stage:
        for _ in range(2):
            assert (await stage.rows())[0]["reward"] == 1.0
            assert served[-1].strip() == (own / "cert.pem").read_text().strip()
            certs.renew(authority, own)
        assert served[0] != served[1]


async def opened(config: Json, place: Place | None = None) -> AgentServicer:
    servicer = AgentServicer(RewardMetrics(), Fence(), place)
    try:
        await servicer.open("run", AgentEnvironmentConfig.model_validate(config))
    finally:
        await servicer.end()
    return servicer


async def test_an_agent_that_could_not_call_back_safely_is_refused(authority: Path, tmp_path: Path):
    away = {"url": "https://agent.lab/episode"}
    for name, hosts in (("named", ["127.0.0.1", "reward.lab", "alias.lab"]), ("local", ["127.0.0.1", "localhost"])):
        certs.issue(authority, Role.REWARD, hosts, tmp_path / name)
    named, local = Credentials(tmp_path / "named"), Credentials(tmp_path / "local")
    refused = [(None, "--tls"), (Place("10.0.0.1"), "--tls"), (Place("localhost", named), "--listen")]
    for place, why in [*refused, (Place("0.0.0.0", local), "names no host")]:
        with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="environment") as caught:
            await opened(away, place)
        assert why in caught.value.message
    await opened(away, Place("0.0.0.0", named))
    assert Site(AgentEnvironmentConfig.model_validate(away), Place("0.0.0.0", named)).url(5) == "https://reward.lab:5"
    async with serving(lambda _: asyncio.Event().wait()) as url:  # type: ignore[arg-type,return-value]
        port = int(url.rsplit(":", 1)[1].partition("/")[0])
        with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="environment") as caught:
            await opened({"url": url, "port": port})
        assert "cannot listen" in caught.value.message


async def test_a_host_without_room_is_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch):
    async def fails(self: CommandRunner) -> None:
        raise EpisodeError(EnvironmentFailure.CRASHED, "too many open files") from OSError(errno.EMFILE, "open files")

    monkeypatch.setattr(CommandRunner, "open", fails)
    with pytest.raises(Overloaded, match="raise this limit of the host"):
        await opened({"command": ["true"]})
