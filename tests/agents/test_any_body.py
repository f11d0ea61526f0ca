"""Tests that any JSON which an agent may send is answered or refused, and breaks neither endpoint nor coordinator."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from lockstep.reward.v1.agent_pb2 import AgentCall

from services.common.errors import InvalidInput
from services.coordinator.data.calls import CallLog
from services.coordinator.text import threads
from services.coordinator.text.threads import Renderer, Threads
from services.reward.agents import dialect as dialects
from services.reward.agents.anthropic import Messages
from services.reward.agents.dialect import Dialect, Drops, Refusal, read_tool
from services.reward.agents.openai import Chat, Responses
from tests.agents.in_process import TOKENIZER, caught

Json = dict[str, Any]
RENDERER = Renderer(TOKENIZER, {})
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, tuple[Dialect, Json]] = {
    "chat": (
        Chat(),
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": _PARAMETERS}}],
            "max_tokens": 5,
            "stop": ["x"],
            "stream_options": {"include_usage": True},
        },
    ),
    "messages": (
        Messages(),
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
            ],
            "tools": [{"name": "add", "input_schema": _PARAMETERS}],
            "max_tokens": 5,
            "stop_sequences": ["x"],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
        },
    ),
    "responses": (
        Responses(),
        {
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "tools": [{"type": "function", "name": "add", "parameters": _PARAMETERS}],
            "max_output_tokens": 5,
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
}
_ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "\ud800",
    "<|im_end|>",
    [],
    {},
    [[]],
    [None],
    {"type": "text"},
]
_ODD += [{"a": None}, ["x"], "[" * 2000, "[" * 300 + "]" * 300, "{{ x }}", "\0", {"role": "user"}, {"text": {"a": 1}}]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns each place of a JSON value, as what holds it and its key there."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def changed(body: Json, chance: random.Random) -> Json:
    """Returns a body in which one to three values are others, or are gone."""
    body = copy.deepcopy(body)
    for _ in range(chance.randrange(1, 4)):
        holder, key = chance.choice(places(body) or [(body, "x")])
        if chance.random() < 0.2 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = copy.copy(chance.choice([*_ODD, nested(chance.choice((50, 70, 150)))]))
    return body


def play(dialect: Dialect, body: Json) -> bool:
    """Does with a body what endpoint and coordinator do. Returns whether it became a call; it may be refused."""
    try:
        neutral = dialect.read(json.dumps(body).encode(), Drops()).neutral
        said = json.loads(json.dumps(neutral))
        log = CallLog()
        log.keep(log.ask(AgentCall(), said), said)
        Threads(RENDERER).add(0, said["messages"], said["tools"])
    except (Refusal, InvalidInput):
        return False
    return True


@pytest.mark.parametrize("name", BODIES)
def test_any_body_is_answered_or_refused(name: str):
    dialect, body = BODIES[name]
    assert play(dialect, body)
    chance = random.Random(name)
    became = [play(dialect, changed(body, chance)) for _ in range(200)]
    assert 10 < sum(became) < 190, "some are calls, and some are refused"


MUTANTS: dict[str, tuple[Any, str, Callable[..., object]]] = {
    "bodies may be deep": (dialects, "is_deep", lambda value: False),
    "arguments may be deep": (threads, "is_deep", lambda value: False),
}


@pytest.mark.parametrize("mutant", ["", *MUTANTS])
def test_what_is_nested_too_deep_is_refused_or_text(mutant: str, monkeypatch: pytest.MonkeyPatch):
    if mutant:
        monkeypatch.setattr(*MUTANTS[mutant])
    chat, body = copy.deepcopy(BODIES["chat"])
    fails = False
    try:
        for depth in range(100, 1000, 50):
            body["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps(nested(depth))
            fails = fails or not play(chat, body)
            function = {"name": "f", "parameters": {"properties": nested(depth)}}
            deep = {**body, "tools": [{"type": "function", "function": function}]}
            fails = fails or play(chat, deep)
    except RecursionError:
        fails = True
    with caught(mutant):
        assert not fails


def test_a_tool_is_shown_in_the_usual_order_and_its_schema_is_one():
    shown = read_tool({"parameters": {"type": "object"}, "description": "b", "name": "a"}, "function")
    assert json.dumps(shown) == (
        '{"type": "function", "function": {"name": "a", "description": "b", "parameters": {"type": "object"}}}'
    )
    with pytest.raises(Refusal, match=r"tools: parameters of a must be a JSON schema, not \['x'\]"):
        read_tool({"name": "a", "parameters": ["x"]}, "function")
