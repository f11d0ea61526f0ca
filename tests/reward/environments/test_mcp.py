"""Tools of a real MCP server, over both transports: results, mistakes of the policy, and failures of the server."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError

from services.common.config.environment import McpToolConfig
from services.common.errors import InvalidInput
from tests.reward.environments.test_tools import failure, hermes, texts
from tests.reward.remote_end import served
from tests.support import descendants, free_port, running, still_there

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_server.py"))
NAMES = ["add", "page", "refuse", "wait", "variable", "said", "parts", "structured", "die"]
STDIO = {"kind": "mcp", "command": [sys.executable, SERVER]}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    with running([sys.executable, SERVER, "http", str(port)], tmp_path_factory.mktemp("mcp") / "log"):
        yield f"http://127.0.0.1:{port}/mcp"


async def open_run(service, tool: dict[str, object]) -> list[str]:
    """Returns the names of the tools. Tries again while a server that was just started does not listen yet."""
    for _ in range(600):
        try:
            opened = await service.open(kind="tools", tools=[{"timeout_s": 60, **tool}])
            break
        except InvalidInput as error:
            if "url" not in tool or "onnect" not in error.message:
                raise
            await asyncio.sleep(0.1)
    assert opened.environment.startswith("tools 1/mcp-tiny 1.2-"), opened.environment
    return [schema["function"]["name"] for schema in json.loads(opened.tools_json)]


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_tools_of_a_server_are_listed_and_called(service, transport, request):
    tool = STDIO if transport == "stdio" else {"kind": "mcp", "url": request.getfixturevalue("address")}
    names = await open_run(service, {**tool, "max_output_chars": 20})
    assert names == NAMES
    await service.reset()
    calls = (
        hermes("parts")
        + hermes("structured")
        + hermes("add", a=2, b=40)
        + hermes("page", size=100)
        + hermes("refuse", what="<tea>")
        + hermes("add", a="x")
    )
    answer = await service.step(0, calls + hermes("nothing"))
    parts, structured, *results = [text for _, _, text in texts(answer)]
    assert (parts, structured) == ("a file\nfile:///b", '{"x": 42}')
    assert results[0] == "42"
    assert results[1] == "ab" * 5 + "\n[... cut ...]\n" + "ab" * 5
    assert results[2].startswith("error: ") and "<tea>" in results[2].replace("\n[... cut ...]\n", "")
    assert results[3].startswith("error: ")
    assert results[4] == f"error: there is no tool 'nothing': there are {', '.join(NAMES)}"


async def test_keys_reach_the_server_and_nothing_else(service, address, tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_KEY", "secret")
    await open_run(service, STDIO)
    await service.reset()
    assert texts(await service.step(0, hermes("variable", of="TINY_KEY")))[0][2] == ""
    await service.close_run()
    await open_run(service, {**STDIO, "pass_env": ["TINY_KEY"]})
    await service.reset()
    assert texts(await service.step(0, hermes("variable", of="TINY_KEY")))[0][2] == "secret"
    await service.close_run()
    with pytest.raises(InvalidInput, match="pass_env: the reward service has no variable TINY_CODE"):
        await service.open(kind="tools", tools=[{**STDIO, "pass_env": ["TINY_KEY", "TINY_CODE"]}])
    key = tmp_path / "key"
    key.write_text("secret\n")
    await open_run(service, {"kind": "mcp", "url": f"{address}?key=hidden", "api_key_file": str(key)})
    await service.reset()
    assert texts(await service.step(0, hermes("said", of="Authorization")))[0][2] == "Bearer secret"
    await service.close_run()
    with pytest.raises(InvalidInput) as caught:
        await service.open(kind="tools", tools=[{"kind": "mcp", "url": f"{address}/absent?key=hidden"}])
    assert f"{address}/absent: " in caught.value.message and "hidden" not in caught.value.message


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ({"url": "http://far/mcp", "api_key_file": "key"}, "api_key_file: the key would be sent unencrypted"),
        ({"url": "https://user:key@far/mcp"}, "url: must not contain credentials"),
        ({"url": "https://far/mcp", "pass_env": ["KEY"]}, "pass_env: used only with command"),
        ({"command": ["server"], "api_key_file": "key"}, "api_key_file: used only with url"),
    ],
)
def test_what_would_show_a_key_or_is_not_used_is_refused(tool: dict[str, object], why: str):
    with pytest.raises(ValidationError, match=why):
        McpToolConfig.model_validate(tool)


async def test_only_some_tools_are_offered(service):
    assert await open_run(service, {**STDIO, "names": ["page", "add"]}) == ["add", "page"]
    await service.close_run()
    with pytest.raises(InvalidInput, match="has no tool sub, but add, page"):
        await service.open(kind="tools", tools=[{**STDIO, "names": ["sub"]}])


async def test_a_server_that_dies_or_hangs_has_failed_and_the_next_call_finds_another(service):
    await open_run(service, {**STDIO, "timeout_s": 10})
    for episode in ("dies", "next"):
        await service.reset(episode)
    assert failure(await service.step(0, hermes("die"), "dies")) == "CRASHED"
    assert texts(await service.step(0, hermes("add", a=1, b=2), "next"))[0][2] == "3"
    await service.reset("hangs")
    assert failure(await service.step(0, hermes("wait"), "hangs")) == "TIMEOUT"


async def test_an_error_that_the_server_answers_is_told_to_the_policy(service):
    await open_run(service, {**STDIO, "command": [*STDIO["command"], "rejects"], "names": ["add", "reject"]})
    await service.reset()
    for turn, code in enumerate((-32602, -32603, -32601, -31000)):
        answer = await service.step(turn, hermes("reject", code=code) + hermes("add", a=1, b=2))
        first, second = [text for _, _, text in texts(answer)]
        assert first.startswith("error: ") and "the table is locked" in first and second == "3"


async def test_a_server_that_refuses_a_request_has_failed_and_not_the_policy(service):
    server = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "tiny", "version": "1.2"}}
    results = {"initialize": server, "tools/list": {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}}

    async def reply(asked: dict, _request: web.Request) -> web.Response:
        if "id" not in asked:
            return web.Response(status=202)
        if asked["method"] in results:
            return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]})
        return web.Response(status=503)

    async with served(reply) as end:
        await open_run(service, {"kind": "mcp", "url": end.url})
        await service.reset()
        answer = await service.step(0, hermes("add"))
        assert failure(answer) == "CRASHED" and answer.failure.message.endswith("(status 503)")
        await service.close_run()
        results.clear()
        with pytest.raises(InvalidInput, match=r"\(status 503\)"):
            await service.open(kind="tools", tools=[{"kind": "mcp", "url": end.url}])


async def test_a_closed_run_leaves_no_process(service):
    await open_run(service, STDIO)
    servers = descendants(os.getpid()).items()
    pids = [pid for pid, command in servers if "mcp_server.py" in command and " http " not in command]
    assert pids
    await service.close_run()
    assert not await asyncio.to_thread(still_there, pids)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"command": ["/nowhere/server"]}, "/nowhere/server"),
        ({"command": [sys.executable, "-c", "raise SystemExit(1)"]}, "mcp "),
        ({"url": f"http://127.0.0.1:{free_port()}/mcp"}, "127.0.0.1"),
        ({}, "either command or url"),
        ({"command": ["a"], "url": "http://b"}, "either command or url"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_when_the_run_opens(service, tool, words):
    with pytest.raises(InvalidInput, match=words):
        await service.open(kind="tools", tools=[{"kind": "mcp", **tool}])


async def test_a_missing_package_is_named(service, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(InvalidInput, match=r"lockstep-rl\[mcp\]"):
        await service.open(kind="tools", tools=[STDIO])
