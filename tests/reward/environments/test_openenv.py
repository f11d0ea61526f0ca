"""Episodes on an OpenEnv server, which is written here from openenv-core's types and endpoint."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import WSMsgType, web
from lockstep.reward.v1 import environment_pb2 as pb

from services.common.errors import InvalidInput, Reason
from services.reward.environments import openenv
from tests.support import PATIENCE_S, raises

CAPACITY = {"type": "error", "data": {"message": "8 of 8 sessions", "code": "CAPACITY_REACHED"}}
WRONG = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
BROKE = {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}


def observation(data: object = None, reward: object = None, done: object = False) -> dict[str, object]:
    return {"type": "observation", "data": {"observation": data or {"text": "?"}, "reward": reward, "done": done}}


class Server:
    """Answers as its `answer` says; notes what comes."""

    def __init__(self):
        self.seen: list[dict[str, object]] = []
        self.num_open = self.most_open = 0
        self.answer: Callable[[dict[str, object]], object] = lambda message: observation()
        self.closed, self.ponged = asyncio.Event(), asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        self.socket = socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async for message in socket:
                if message.type is WSMsgType.PONG:
                    self.ponged.set()
                    continue
                assert message.type is WSMsgType.TEXT
                asked = json.loads(message.data)
                self.seen.append(asked)
                if asked["type"] == "close":
                    break
                if not await self._send(socket, self.answer(asked)):
                    break
        finally:
            self.num_open -= 1
            self.closed.set()
        return socket

    async def _send(self, socket: web.WebSocketResponse, answer: object) -> bool:
        if answer == "abort":
            return False
        if answer != "silence":
            await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return True


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server, app = Server(), web.Application()
    app.router.add_get("/ws", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"ws://127.0.0.1:{runner.addresses[0][1]}/ws"
    yield server
    await runner.cleanup()


async def open_run(server, service: Server, **settings: object) -> None:
    opened = await service.open(kind="openenv", url=server.url, num_workers=None, **settings)
    assert opened.environment == "openenv 2" and list(opened.roles) == ["user"]
    server.seen.clear()


def failure(response: pb.ResetResponse | pb.StepResponse) -> str:
    name = pb.EnvironmentFailureReason.Name(response.failure.reason)
    return name.removeprefix("ENVIRONMENT_FAILURE_REASON_") if response.HasField("failure") else ""


async def test_an_episode_is_a_connection(server, service):
    await open_run(server, service, action_field="move", observation_field="board")
    server.answer = lambda message: observation({"board": message["data"].get("move", "start")}, reward=0.5)
    began = await service.reset(seed=2**40 + 3)
    assert [message.content for message in began.messages] == ["start"]
    answer = await service.step(0, "a1")
    assert ([message.content for message in answer.messages], answer.reward, answer.done) == (["a1"], 0.5, False)
    server.answer = lambda message: observation({"board": [[1, None]]}, reward=True, done=True)
    server.closed.clear()
    answer = await service.step(1, "b2")
    assert (answer.messages[0].content, answer.reward, answer.done) == ("[[1, null]]", 1.0, True)
    await server.closed.wait()
    assert [message["type"] for message in server.seen] == ["reset", "step", "step", "close"]
    assert server.seen[0]["data"]["seed"] == 3
    assert server.seen[1]["data"] == {"move": "a1"}
    assert server.num_open == 0


async def test_the_whole_observation_is_shown_by_default_but_for_its_metadata(server, service):
    await open_run(server, service)
    server.answer = lambda message: observation({"a": "é", "metadata": {"answer": 42}, "b": [1]})
    assert (await service.reset()).messages[0].content == '{"a": "é", "b": [1]}'


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (CAPACITY, "REFUSED"),
        (BROKE, "CRASHED"),
        ("abort", "CRASHED"),
        ("no JSON", "INVALID_REPLY"),
        ("[" * 100_000, "INVALID_REPLY"),
        ({"type": "state", "data": {}}, "INVALID_REPLY"),
        ({"type": "observation", "data": {"reward": 1.0, "done": True}}, "INVALID_REPLY"),
        (observation(done="no"), "INVALID_REPLY"),
        (observation(reward="1"), "INVALID_REPLY"),
        (observation(reward=float("nan")), "INVALID_REPLY"),
        ('{"type": "observation", "data": "' + "a" * openenv.MAX_ANSWER_BYTES + '"}', "INVALID_REPLY"),
        ("silence", "TIMEOUT"),
    ],
)
async def test_a_server_that_fails_is_never_a_reward(server, service, answer, reason):
    await open_run(server, service, **({"turn_s": 1.0} if answer == "silence" else {}))
    await service.reset()
    server.answer = lambda message: answer
    server.closed.clear()
    assert failure(await service.step(0, "a1")) == reason
    await server.closed.wait()
    server.answer = lambda message: observation()
    assert not failure(await service.reset("other"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (CAPACITY, "8 of 8 sessions Set environment.max_concurrent"),
        ({"type": "error", "data": WRONG | {"errors": [{"loc": ["guess"]}]}}, "Invalid message [{'loc': ['guess']}]"),
    ],
)
async def test_a_refusal_says_what_to_change(server, service, answer, words):
    await open_run(server, service)
    server.answer = lambda message: answer
    assert words in (await service.reset()).failure.message


async def test_pings_are_answered_while_the_policy_thinks(server, service):
    await open_run(server, service)
    await service.reset()
    await server.socket.ping()  # uvicorn ends a connection that does not answer one within 20 s
    await asyncio.wait_for(server.ponged.wait(), PATIENCE_S)
    assert not failure(await service.step(0, "a1"))


async def test_an_episode_that_is_done_at_its_reset_is_refused(server, service):
    await open_run(server, service)
    server.answer = lambda message: observation(done=True)
    assert failure(await service.reset()) == "INVALID_REPLY"


async def test_no_more_connections_are_open_than_may_be(server, service):
    await open_run(server, service, max_concurrent=2)
    server.most_open = 0

    async def play(name: str) -> None:
        assert not failure(await service.reset(name))
        assert not failure(await service.step(0, "a", name))
        await service.close(name)

    await asyncio.gather(*(play(str(number)) for number in range(8)))
    assert server.most_open == 2


async def test_waiting_for_a_connection_is_no_timeout(server, service):
    await open_run(server, service, max_concurrent=1, turn_s=1.0)
    await service.reset("first")
    waiting = asyncio.create_task(service.reset("second"))
    server.answer = lambda message: "silence" if message["type"] == "step" else observation()
    assert failure(await service.step(0, "a", "first")) == "TIMEOUT"  # as long as the second may take
    assert not failure(await waiting)


async def test_a_server_that_is_not_there_is_refused_when_the_run_opens(server, service, unused_tcp_port):
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="environment"):
        await service.open(kind="openenv", url=f"ws://127.0.0.1:{unused_tcp_port}/ws", num_workers=None)


async def test_an_address_without_a_websocket_is_refused_and_its_key_is_not_shown(server, service):
    with pytest.raises(InvalidInput, match=r"no connection to .*/web: status 404; .* is at /ws$"):
        await service.open(kind="openenv", url=f"{server.url[:-3]}/web?key=hidden", num_workers=None)


async def test_a_key_in_the_address_is_refused(service):
    with pytest.raises(InvalidInput, match="must not contain credentials"):
        await service.open(kind="openenv", url="ws://me:key@far:8000/ws", num_workers=None)
