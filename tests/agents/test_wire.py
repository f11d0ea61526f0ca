"""Replays sessions of the shape of Codex CLI's and Claude Code's, read by the SDKs' own parsers in strict mode.

The texts are made up; keys, events and what comes back changed are those that the real programs were seen to send.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from lockstep.reward.v1.agent_pb2 import AgentCall, CallAnswer

from services.coordinator.text import threads
from services.reward.agents import endpoint as module
from services.reward.agents.runners import FunctionRunner, Played
from tests.agents.harness import staged, table_of
from tests.agents.in_process import caught
from tests.agents.test_bytes import as_another_library
from tests.agents.test_dialects import claude, gpt, refuses, says, served
from tests.support import until

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "additionalProperties": False}
CALL = 'I look.\n<tool_call>\n{"name": "add", "arguments": {"b": 5000.0, "a": "ls"}}\n</tool_call>'


def model(prompt: str, seed: int) -> str:
    """Calls a tool after each odd message of a user's, and says something after a result."""
    return CALL if "tool_response" not in prompt.rpartition("<|im_start|>user")[2] else f"Done {seed % 100}."


async def codex(client: openai.AsyncOpenAI) -> int:
    """Plays three rounds of a call and its result. Returns the number of requests."""
    begin = (("developer", "<rights>none"), ("user", "<place>here"), ("developer", "Work alone."), ("user", "Mend it."))
    history: list[Any] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]} for role, text in begin
    ]
    tools: list[Any] = [
        {"type": "function", "name": "add", "description": "Runs.", "strict": False, "parameters": SCHEMA},
        {"type": "namespace", "name": "agents", "description": "Others.", "tools": [{"type": "function", "name": "x"}]},
        {"type": "web_search", "external_web_access": False},
    ]
    for index in range(3):
        asked: Json = {
            **{"model": "any", "instructions": "You are a coding agent.", "input": history, "tools": tools},
            **{"tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "medium"}, "store": False},
            **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "0", "text": {"verbosity": "low"}},
            "extra_body": {"client_metadata": {"installation": "0"}},
        }
        items, completed = [], None
        async for event in await client.responses.create(**asked, stream=True):
            if event.type == "response.output_item.done":  # what Codex builds its history of
                items.append(event.item)
            completed = event.response if event.type == "response.completed" else completed
        assert completed and completed.usage and completed.usage.output_tokens
        assert [item.id for item in completed.output] == [item.id for item in items]
        history += [item.to_dict() for item in items]
        calls = [item for item in items if item.type == "function_call"]
        history += [] if calls else [{"role": "user", "content": [{"type": "input_text", "text": "Again."}]}]
        for call in calls:
            output = f"Exit code: 0\nChunk ID: {index}\nOutput:\nfile"
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return 3


async def claude_code(client: anthropic.AsyncAnthropic) -> int:
    """Plays rounds in which earlier messages come back in other forms. Returns the number of requests."""
    mark: Json = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system: Any = [{"type": "text", "text": "header."}, {"type": "text", "text": "You are an agent.", **mark}]
    tools: Any = [{"name": "add", "description": "Runs.", "input_schema": SCHEMA}]
    first: Any = [{"type": "text", "text": "<note>no"}, {"type": "text", "text": "Mend it.", **mark}]
    history: list[Any] = [{"role": "user", "content": first}, {"role": "system", "content": "It is Monday."}]
    for index in range(4):
        asked: Any = {
            **{"model": "any", "max_tokens": 32000, "messages": history, "system": system, "tools": tools},
            **{"metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "betas": ["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        }
        counted = await client.beta.messages.count_tokens(
            **{key: value for key, value in asked.items() if key not in ("max_tokens", "metadata")}
        )
        async with client.beta.messages.stream(**asked) as stream:
            answer = await stream.get_final_message()
        assert answer.usage.input_tokens == counted.input_tokens and answer.usage.output_tokens
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        if len(content) == 1 and content[0]["type"] == "text" and index % 2:  # the same message as plain text
            content = content[0]["text"]
        else:
            content = [{**as_another_library(block), **(mark if block is content[-1] else {})} for block in content]
        uses = [block.id for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": name, "content": "file", "is_error": False, **mark} for name in uses
        ]
        history = [{**one, "content": _moved(one["content"])} for one in history]  # cache marks move on
        history += [{"role": "assistant", "content": content}, {"role": "user", "content": results or f"And {index}?"}]
    return 4


def _moved(content: Any) -> Any:
    """Returns a content without its marks; one that has a single text as that text."""
    if isinstance(content, str):
        return content
    blocks = [{key: value for key, value in block.items() if key != "cache_control"} for block in content]
    return blocks[0]["text"] if len(blocks) == 1 and blocks[0]["type"] == "text" else blocks


@pytest.mark.parametrize("session", [codex, claude_code])
@pytest.mark.parametrize("mutant", ["", "messages are compared as they came"])
async def test_a_recorded_session_is_one_segment(mutant: str, session: Any, monkeypatch: pytest.MonkeyPatch):
    """The agent runs in this process, against the real endpoint, service and collector."""
    if mutant and session is codex:
        return  # it sends back exactly what it got
    if mutant:
        monkeypatch.setattr(threads, "_value", str)
    said = list[int]()

    async def run(self: object, part: Any) -> Any:
        base, common = part.url, {"api_key": part.key, "max_retries": 0}
        if session is codex:
            client: Any = openai.AsyncOpenAI(base_url=f"{base}/v1", **common, _strict_response_validation=True)
        else:
            client = anthropic.AsyncAnthropic(base_url=base, **common, _strict_response_validation=True)
        async with client:
            said.append(await session(client))
        return Played(0, "4")

    monkeypatch.setattr(FunctionRunner, "run", run)
    settings: Json = {"path": "tests.agents.user_agents:silent", "drop_tools": ["web_search", "namespace"]}
    async with staged(model, num_workers=1, **settings) as stage:
        group = await stage.play()
        assert group is not None
        rows = table_of(group).to_pylist()
        with caught(mutant):
            assert [len(row["turn_begins"]) for row in rows] == said


class Counting(httpx2.AsyncBaseTransport):
    """Counts the requests of a client by the status of their answers."""

    def __init__(self) -> None:
        self.inner, self.statuses = httpx2.AsyncHTTPTransport(), Counter[int]()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self.inner.handle_async_request(request)
        self.statuses[response.status_code] += 1
        return response


@contextlib.asynccontextmanager
async def both(ask: Any, key: str = "") -> AsyncIterator[tuple[list[tuple[Any, Counting]], Any]]:
    """Yields a call of each SDK, with its own retries, and what counts its requests; and the line."""
    async with served(ask) as (url, line), contextlib.AsyncExitStack() as stack:
        calls: list[tuple[Any, Counting]] = []
        for name in ("openai", "anthropic"):
            count = Counting()
            http = await stack.enter_async_context(httpx2.AsyncClient(transport=count))
            if name == "openai":
                gpt_client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or line.key, http_client=http)
                calls.append((lambda text, c=gpt_client: c.responses.create(model="any", input=text), count))
            else:
                own = anthropic.AsyncAnthropic(base_url=url, api_key=key or line.key, http_client=http)
                calls.append(
                    (
                        lambda text, c=own: c.messages.create(
                            model="any", max_tokens=9, messages=[{"role": "user", "content": text}]
                        ),
                        count,
                    )
                )
        yield calls, line


ENDS = [(400, "overflow", ""), (400, "over", ""), (401, "x", "wrong"), (413, "x" * (9 << 20), "")]


@pytest.mark.parametrize(("status", "text", "key"), ENDS, ids=["overflow", "over", "key", "size"])
async def test_an_end_is_asked_for_once(status: int, text: str, key: str):
    async with both(refuses, key) as (calls, line):
        if text == "over":
            line.close()
        for call, count in calls:
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as told:
                await call(text)
            assert told.value.status_code == status and count.statuses == {status: 1}


async def test_backpressure_is_waited_for_and_then_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_WAITING", 1)
    waiting = asyncio.Event()

    async def ask(call: AgentCall) -> CallAnswer:
        if "first" in call.request_json:
            await waiting.wait()
        return await says({"content": "hi"})(call)

    async with both(ask) as (calls, _):
        for call, count in calls:
            waiting.clear()
            first = asyncio.create_task(call("first"))
            second = asyncio.create_task(call("second"))
            while not count.statuses[429]:
                await asyncio.sleep(0.01)
            waiting.set()
            await asyncio.gather(first, second)
            assert count.statuses[200] == 2 and set(count.statuses) == {200, 429}


async def test_equal_requests_at_once_are_calls_of_their_own_unless_one_is_repeated():
    asked, waiting = list[int](), asyncio.Event()

    async def ask(call: AgentCall) -> CallAnswer:
        asked.append(call.number)
        await waiting.wait()
        return await says({"content": "hi"})(call)

    async with both(ask) as (calls, line):
        for call, _ in calls:
            asked.clear()
            waiting.clear()
            line.num_retries = 0
            left, stays = (asyncio.create_task(call("x")) for _ in range(2))
            await until(lambda: len(asked) == 2)
            left.cancel()  # as a time limit above the client does
            await until(lambda: not all(one.is_open() for one in line._waiting))
            again = asyncio.create_task(call("x"))
            await until(lambda: line.num_retries)
            waiting.set()
            assert len({answer.id for answer in await asyncio.gather(stays, again)}) == len(asked) == 2


async def test_answers_that_nobody_has_waited_for_leave_room_to_further_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_WAITING", 2)
    waiting = asyncio.Event()

    async def ask(call: AgentCall) -> CallAnswer:
        await waiting.wait()
        return await says({"content": "hi"})(call)

    async with both(ask) as (calls, line):
        for call, count in calls:
            waiting.clear()
            gone = [asyncio.create_task(call(text)) for text in ("first", "second")]
            await until(lambda: len(line._waiting) == 2 and not any(one.answering.done() for one in line._waiting))
            for one in gone:
                one.cancel()
            await until(lambda: not any(one.is_open() for one in line._waiting))
            waiting.set()
            await until(lambda: all(one.answering.done() for one in line._waiting))
            await call("second")
            await call("third")
            assert set(count.statuses) == {200} and len(line._waiting) <= 1


async def test_a_compressed_body_is_refused_and_never_decompressed():
    async with served(says({"content": "hi"})) as (url, line):
        host, _, port = url.removeprefix("http://").partition(":")
        reading, asking = await asyncio.open_connection(host, int(port))
        head = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {line.key}\r\n"
        asking.write(f"POST /v1/messages {head}Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nno".encode())
        assert b" 415 " in await reading.readuntil(b"only identity")
        # To decompress what is no gzip would have ended the connection.
        asking.write(f"GET /v1/models {head}\r\n".encode())
        assert b" 200 " in await reading.readuntil(b"]}")
        asking.close()


async def test_a_connection_without_a_key_is_closed_and_one_with_a_key_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_STRANGER_S", 0.5)
    async with served(says({"content": "hi"})) as (url, line):
        host, _, port = url.removeprefix("http://").partition(":")
        (known, asking), (stranger, idle) = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        ask = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {line.key}\r\n\r\n".encode()
        asking.write(ask)
        assert await known.readuntil(b"]}")
        assert await stranger.read() == b""
        asking.write(ask)
        assert (await known.readuntil(b"]}")).startswith(b"HTTP/1.1 200")
        asking.close()
        idle.close()


async def test_a_long_outage_is_no_error_of_a_client(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_KEEP_ALIVE_S", 0.01)

    async def late(call: AgentCall) -> CallAnswer:
        await asyncio.sleep(0.3)
        return await says({"content": "hi"})(call)

    asked: Any = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    async with claude(late) as client, client.messages.stream(**asked) as stream:
        assert (await stream.get_final_message()).content[0].to_dict()["text"] == "hi"
    async with gpt(late) as gpt_client, gpt_client.responses.stream(model="any", input="x") as events:
        assert (await events.get_final_response()).output_text == "hi"
