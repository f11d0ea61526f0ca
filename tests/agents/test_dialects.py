"""Tests the dialects of the endpoint: with the real clients in strict mode, and with the bytes that they never send."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from lockstep.reward.v1.agent_pb2 import AgentCall, CallAnswer

from services.reward.agents import endpoint as module
from services.reward.agents.anthropic import Messages
from services.reward.agents.dialect import Drops, Refusal
from services.reward.agents.endpoint import Endpoint, Line
from services.reward.agents.openai import Chat, Responses
from tests.agents.harness import staged, table_of

Json = dict[str, Any]
CALL = {"id": "c00000000", "name": "add", "arguments": '{"b": 5000.0, "a": "x"}'}
SAID = {"role": "assistant", "content": "I add.", "reasoning": "Easy.", "tool_calls": [CALL]}
SCHEMA = {"type": "object", "properties": {"a": {}, "b": {}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
TOOL = {"name": "add", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
FUNCTION = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
DROPS = Drops(["web_search", "namespace"])
HELLO: Any = [{"role": "user", "content": "hello"}]


def says(message: Json, reason: str = "stop", **more: Any) -> Callable[[AgentCall], Awaitable[CallAnswer]]:
    async def ask(call: AgentCall) -> CallAnswer:
        whole = {"num_prompt_tokens": 7, "num_sampled_tokens": 3, **more}
        return CallAnswer(call=call.number, message_json=json.dumps(message), finish_reason=reason, **whole)

    return ask


@contextlib.asynccontextmanager
async def served(ask: Callable[[AgentCall], Awaitable[CallAnswer]]) -> AsyncIterator[tuple[str, Line]]:
    """Yields the URL of an endpoint, and the line of one episode whose calls `ask` answers."""
    endpoint = Endpoint(DROPS)
    await endpoint.open_port()
    try:
        yield f"http://127.0.0.1:{endpoint.port}", endpoint.begin(ask, 4096)
    finally:
        await endpoint.close()


@contextlib.asynccontextmanager
async def claude(ask: Callable[[AgentCall], Awaitable[CallAnswer]]) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with served(ask) as (url, line):
        options: Json = {"base_url": url, "api_key": line.key, "max_retries": 0}
        async with anthropic.AsyncAnthropic(**options, _strict_response_validation=True) as client:
            yield client


@contextlib.asynccontextmanager
async def gpt(ask: Callable[[AgentCall], Awaitable[CallAnswer]]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(ask) as (url, line):
        options: Json = {"base_url": f"{url}/v1", "api_key": line.key, "max_retries": 0}
        async with openai.AsyncOpenAI(**options, _strict_response_validation=True) as client:
            yield client


async def test_messages_are_what_anthropics_client_reads_whole_and_as_a_stream():
    async with claude(says(SAID, "tool_calls")) as client:
        asked: Any = {"model": "any", "max_tokens": 9, "messages": HELLO, "tools": [TOOL]}
        whole = await client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        thinking, text, use = (block.model_dump(exclude_none=True) for block in whole.content)
        assert (thinking["thinking"], text["text"]) == ("Easy.", "I add.")
        assert thinking["signature"], "some clients send reasoning without one back as a message of the user"
        assert (use["id"], use["name"], use["input"]) == (CALL["id"], "add", {"b": 5000, "a": "x"})
        assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (7, 3)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        blocks = [[block.model_dump(exclude_none=True) for block in message.content] for message in (final, whole)]
        assert blocks[0] == blocks[1] and final.usage.output_tokens == 3
        assert (final.stop_reason, final.stop_sequence) == ("tool_use", None)
        events = [event async for event in await client.messages.create(**asked, stream=True)]
        begun = next(event for event in events if event.type == "content_block_start").content_block
        assert begun.to_dict() == {"type": "thinking", "thinking": "", "signature": ""}, "deltas are added to it"
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        kinds = ["message_start", *block[:2], *block[1:], *block, *block, "message_delta", "message_stop"]
        assert [event.type for event in events] == kinds
        assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [("stop", "", ("end_turn", None)), ("length", "", ("max_tokens", None)), ("stop", "END", ("stop_sequence", "END"))],
)
async def test_an_answer_of_messages_says_why_it_has_ended(reason: str, stop: str, expected: tuple[str, str | None]):
    async with claude(says({"content": ""}, reason, stop_sequence=stop)) as client:
        answer = await client.messages.create(model="any", max_tokens=9, messages=HELLO)
        assert (answer.stop_reason, answer.stop_sequence) == expected
        assert answer.content[0].to_dict() == {"type": "text", "text": ""}, "an agent that reads it does not crash"


async def test_responses_are_what_openais_client_reads_whole_and_as_a_stream():
    async with gpt(says(SAID, "tool_calls")) as client:
        asked: Any = {"model": "any", "input": "hello", "tools": [FUNCTION]}
        whole = await client.responses.create(**asked)
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        reasoning, _, call = (item.to_dict() for item in whole.output)
        assert (reasoning["content"], whole.output_text) == ([{"type": "reasoning_text", "text": "Easy."}], "I add.")
        assert [call["call_id"], call["name"], call["arguments"]] == list(CALL.values())
        assert whole.usage and (whole.usage.input_tokens, whole.usage.total_tokens) == (7, 10)
        assert whole.status == "completed" and whole.incomplete_details is None
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert (final.output_text, final.status, final.usage) == ("I add.", "completed", whole.usage)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
        inner = [[name.format(kind) for name in part] for kind in ("reasoning_text", "output_text")]
        inner.append(["function_call_arguments.delta", "function_call_arguments.done"])
        kinds = [kind for one in inner for kind in ("output_item.added", *one, "output_item.done")]
        assert [event.type for event in events] == [f"response.{kind}" for kind in ("created", *kinds, "completed")]
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_response_that_was_cut_off_is_incomplete():
    async with gpt(says({"content": "I"}, "length")) as client:
        answer = await client.responses.create(model="any", input="hello")
        assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
        events = [event.type async for event in await client.responses.create(model="any", input="x", stream=True)]
        assert answer.status == "incomplete" and events[-1] == "response.incomplete"


SYSTEM, LATER = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "It is late."}
CONVERSATION: list[Json] = [
    *(SYSTEM, {"role": "user", "content": "hello"}, SAID),
    *({"role": "tool", "content": "4", "tool_call_id": "c00000000"}, LATER, {"role": "user", "content": "so?"}),
]
THOUGHT = {"type": "thinking", "thinking": "Easy.", "signature": ""}
USE = {"type": "tool_use", "id": "c00000000", "name": "add", "input": {"a": "x", "b": 5000}, "cache_control": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c00000000", "content": [{"type": "text", "text": "4"}]}


def text(words: str, kind: str = "text") -> Json:
    return {"type": kind, "text": words, "cache_control": {"type": "ephemeral"}}


ANTHROPIC: Json = {
    "model": "any", "max_tokens": 9, "stop_sequences": ["END"], "temperature": 1, "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"}, "metadata": {"user_id": "me"}, "stream": False,
    "tool_choice": {"type": "auto"}, "service_tier": "auto",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [text("Be "), text("brief.")],
    "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    "messages": [
        {"role": "user", "content": [text("hel"), text("lo")]},
        {"role": "assistant", "content": [THOUGHT, text("I add."), USE]},
        {"role": "user", "content": [RESULT]},
        {"role": "system", "content": [text("It is late.")]},
        {"role": "user", "content": "so?"},
    ],
}  # fmt: skip
RESPONSES: Json = {
    "model": "any", "max_output_tokens": 9, "top_p": 1, "reasoning": {"effort": "high"}, "text": {"verbosity": "low"},
    "store": False, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True, "tool_choice": "auto",
    "previous_response_id": None, "truncation": "disabled", "instructions": "Be brief.", "prompt_cache_key": "k",
    "tools": [FUNCTION, {"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": []}],
    "input": [
        {"role": "user", "content": [text("hello", "input_text")]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [text("Easy.", "reasoning_text")]},
        {"type": "message", "role": "assistant", "id": "m", "content": [text("I add.", "output_text")]},
        {"type": "function_call", "id": "f", "call_id": "c00000000", "name": "add", "arguments": CALL["arguments"]},
        {"type": "function_call_output", "call_id": "c00000000", "output": "4"},
        {"type": "message", "role": "developer", "content": "It is late."},
        {"type": "message", "role": "user", "content": "so?"},
    ],
}  # fmt: skip


def as_values(messages: list[Json]) -> list[Json]:
    """Returns messages with arguments as they are compared when calls are mapped."""

    def made(message: Json) -> list[Json]:
        return [{**call, "arguments": json.loads(call["arguments"])} for call in message.get("tool_calls", ())]

    return [{**message, "tool_calls": made(message)} for message in messages]


def test_one_conversation_in_three_dialects_is_one_request():
    echoed = {**SAID, "tool_calls": [{"id": CALL["id"], "function": CALL}]}
    messages = [echoed if message is SAID else message for message in CONVERSATION]
    chat = {"messages": messages, "tools": [CHAT_TOOL], "max_tokens": 9, "temperature": 1}
    for dialect, body, overridden, stop in (
        (Chat(), chat, ["temperature"], []),
        (Messages(), ANTHROPIC, ["output_config", "temperature", "thinking"], ["END"]),
        (Responses(), RESPONSES, ["reasoning", "top_p"], []),
    ):
        read = dialect.read(json.dumps(body).encode(), DROPS)
        assert as_values(read.neutral["messages"]) == as_values(CONVERSATION), dialect
        assert read.neutral | {"messages": 0} == {"messages": 0, "tools": [CHAT_TOOL], "max_tokens": 9, "stop": stop}
        assert (read.overridden, read.streams, read.counts) == (overridden, False, False)


def test_items_of_two_answers_are_two_messages():
    answer = [RESPONSES["input"][1], RESPONSES["input"][2], RESPONSES["input"][3]]
    items = [HELLO[0], answer[1], answer[1], *answer, answer[2], answer[0], {"type": "reasoning", "summary": []}]
    read = Responses().read(json.dumps({"input": items}).encode(), Drops()).neutral["messages"]
    said = {"role": "assistant", "content": "I add."}
    third, fourth = {**SAID, "tool_calls": [CALL, CALL]}, {**said, "content": "", "reasoning": "Easy."}
    assert read == [HELLO[0], said, said, third, fourth]


def one(role: str, block: Json) -> list[Json]:
    return [{"role": role, "content": [block]}]


REFUSED: list[tuple[Any, Json, str]] = [
    (Messages, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (Messages, {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    (Messages, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice"),
    (Messages, {"messages": one("user", {"type": "image"})}, "messages[0].content[0]"),
    (Messages, {"messages": one("user", {**RESULT, "content": [{"type": "image"}]})}, "messages[0].content[0].content"),
    (Messages, {"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages"),
    (Messages, {"messages": [*one("assistant", {"type": "redacted_thinking"}), *HELLO]}, "messages[0].content[0]"),
    (Messages, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    (Messages, {"messages": [7]}, "messages"),
    (Messages, {"messages": []}, "messages"),
    (Messages, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    (Messages, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
    (Messages, {"context_management": {"edits": 7}}, "context_management"),
    (Messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
    (Messages, {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    (Messages, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
    (Messages, {"max_tokens": 0}, "max_tokens"),
    (Messages, {"stop_sequences": [""]}, "stop_sequences"),
    (Messages, {"stop_sequences": ["x"] * 65}, "stop_sequences"),
    (Responses, {"previous_response_id": "resp_0"}, "previous_response_id"),
    (Responses, {"tool_choice": "required"}, "tool_choice"),
    (Responses, {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    (Responses, {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (Responses, {"text": {"format": {"type": "json_object"}}}, "text"),
    (Responses, {"truncation": "auto"}, "truncation"),
    (Responses, {"background": True}, "background"),
    (Responses, {"conversation": "c"}, "conversation"),
    (Responses, {"input": one("user", {"type": "input_image"})}, "input[0].content"),
    (Responses, {"input": [{"type": "item_reference", "id": "m"}]}, "input[0]"),
    (Responses, {"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
    (Responses, {"input": []}, "input"),
    (Responses, {"tools": [{"type": "custom", "name": "patch"}]}, "tools"),
    (Responses, {"max_output_tokens": -1}, "max_output_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "more", "param"), REFUSED)
def test_what_cannot_be_rendered_or_changes_the_distribution_is_refused(dialect: Any, more: Json, param: str):
    plain: Json = {"input": "hello"} if dialect is Responses else {"messages": HELLO}
    dialect().read(json.dumps(plain).encode(), Drops())
    with pytest.raises(Refusal) as caught:
        dialect().read(json.dumps({**plain, **more}).encode(), Drops())
    assert (caught.value.param, caught.value.status) == (param, 400)


CHOSEN: Json = {"tool_choice": "required", "parallel_tool_calls": False}
FORMAT: Json = {"type": "json_schema"}
DROPPED: list[tuple[Any, Json]] = [
    (Chat, {**CHOSEN, "response_format": FORMAT, "logprobs": True, "chat_template_kwargs": {"enable_thinking": False}}),
    (Messages, {"tool_choice": {"type": "any"}, "output_config": {"format": FORMAT}}),
    (Responses, {**CHOSEN, "text": {"format": FORMAT}, "truncation": "auto"}),
]


@pytest.mark.parametrize(("dialect", "more"), DROPPED)
def test_fields_of_the_answer_are_left_out_if_the_run_names_them_and_refused_with_that_fix_if_not(
    dialect: Any, more: Json
):
    plain: Json = {"input": "hello"} if dialect is Responses else {"messages": HELLO}
    expected = dialect().read(json.dumps(plain).encode(), Drops())
    assert dialect().read(json.dumps({**plain, **more}).encode(), Drops(fields=more)) == expected
    for key in more:
        with pytest.raises(Refusal, match=f"^{key}: .*; environment.drop_fields can leave it out$"):
            dialect().read(json.dumps({**plain, **more}).encode(), Drops(fields=more.keys() - {key}))


async def refuses(call: AgentCall) -> CallAnswer:
    return CallAnswer(call=call.number, refusal="the prompt has 9 tokens", refusal_code="context_length_exceeded")


async def test_errors_have_the_shape_of_the_dialect():
    async with claude(refuses) as client:
        asked: Any = {"model": "any", "max_tokens": 9, "messages": HELLO}
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**asked)
        error = {"type": "invalid_request_error", "message": "prompt is too long: the prompt has 9 tokens"}
        assert caught.value.body == {"type": "error", "error": error}
        with pytest.raises(anthropic.AuthenticationError) as denied:
            await client.with_options(api_key="wrong").messages.create(**asked)
        assert denied.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    async with gpt(refuses) as client:
        with pytest.raises(openai.BadRequestError) as told:
            await client.responses.create(model="any", input="hello")
        assert (told.value.code, told.value.type) == ("context_length_exceeded", "invalid_request_error")


async def test_a_stream_is_kept_alive_and_then_is_whole_or_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_KEEP_ALIVE_S", 0.01)

    async def late(call: AgentCall) -> CallAnswer:
        await asyncio.sleep(0.1)
        return await (refuses if "refuse" in call.request_json else says({"content": "hi"}))(call)

    async with served(late) as (url, line), httpx.AsyncClient(headers={"x-api-key": line.key}) as client:

        async def post(path: str, words: str) -> str:
            body = {
                "stream": True,
                "input" if "responses" in path else "messages": [{"role": "user", "content": words}],
            }
            return (await client.post(f"{url}/v1/{path}", json=body)).text

        ping = 'event: ping\ndata: {"type": "ping"}\n\n'
        good, bad = await post("messages", "x"), await post("messages", "refuse")
        assert good.startswith(ping) and good.endswith('event: message_stop\ndata: {"type": "message_stop"}\n\n')
        assert bad.startswith(ping) and 'event: error\ndata: {"type": "error", "error": {"type": "invalid' in bad
        good, bad = await post("responses", "x"), await post("responses", "refuse")
        assert good.startswith(": ") and "event: response.completed\n" in good
        assert bad.startswith(": ") and "event: response.failed\n" in bad and "context_length_exceeded" in bad
        assert "response.completed" not in bad and "message_stop" not in bad


async def test_anything_answers_a_head_request():
    async with served(refuses) as (url, _), httpx.AsyncClient() as client:
        for path in ("/", "/api/hello", "/v1/messages", "/v1/models"):
            assert (await client.head(url + path)).status_code == 200
        assert (await client.get(f"{url}/v1/messages")).status_code == 404


async def test_a_model_of_any_name_is_the_policy():
    async with served(refuses) as (url, line), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=line.key) as client:
        (listed,) = (await client.models.list()).data
        assert listed.id == "policy"
        assert await client.models.retrieve("policy") == await client.models.retrieve("openai/gpt-5") == listed


async def test_agents_of_all_dialects_make_the_same_rows():
    def model(prompt: str, seed: int) -> str:
        if "tool_response" not in prompt.rpartition("</tools>")[2]:
            return 'I add.\n<tool_call>\n{"name": "add", "arguments":  {"b": 5000.0, "a": "\\u0041\\/"}}\n</tool_call>'
        return f"answer {seed % 1000} END more"

    tables = []
    agent: Json = {"path": "tests.agents.dialect_agents:speaks", "num_workers": 1, "columns": ["dialect"]}
    async with staged(model, **agent) as stage:
        for dialect in ("chat", "messages", "responses"):
            group = await stage.play(dialect=dialect)
            assert group is not None and group.left[0]
            rows = table_of(group).to_pylist()
            assert [len(row["turn_begins"]) for row in rows] == [3], dialect
            counted = json.loads(group.left[0].text)
            assert counted in ([], [len(prompt) for prompt, _ in stage.engine.log[-3:]]), "tokens are counted exactly"
            assert bool(counted) is (dialect == "messages")
            tables.append(table_of(group).select(["prompt_tokens", "tokens", "loss_mask", "seed", "turn_ends"]))
            assert len(stage.engine.log) == 3 * len(tables), "a count asks the engine nothing"
    assert tables[1].equals(tables[0]) and tables[2].equals(tables[0])
