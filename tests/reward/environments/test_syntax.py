"""Tests tool calls in the policy's text, well-formed and hostile."""

import time

import pytest

from services.reward.environments.base import ToolCall
from services.reward.environments.tool_calls.syntax import MAX_CALLS, BadCall, find_calls

ARGUMENTS = {"search": "query", "python": "code"}


def calls(syntax: str, text: str) -> list[object]:
    """Returns the calls that are found: (name, arguments) of each, or the error message of a bad one."""
    found = find_calls(syntax, text, ARGUMENTS)
    return [call.detail if isinstance(call, BadCall) else (call.name, call.arguments) for call in found]


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


CALL = '{"name": "add", "arguments": {"a": 1, "b": [2.5, null, "x"]}}'
ADD = ("add", {"a": 1, "b": [2.5, None, "x"]})


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        ("hermes", "The answer is 4.", []),
        ("hermes", f"I add. {block(CALL)}", [ADD]),
        ("hermes", f"{block(CALL)}\n{block(CALL)} done", [ADD, ADD]),
        ("hermes", block('{"name": "now"}'), [("now", {})]),
        ("hermes", block('{"name": "say", "arguments": {"text": "a\nb"}}'), [("say", {"text": "a\nb"})]),
        ("hermes", "</tool_call> <tool_cal>", []),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3", ' <|python_tag|>{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', [("a", {}), ("b", {})]),
        ("llama3", "{1, 2} is the set", []),
        ("llama3", 'I call {"name": "add", "parameters": {}}', []),
        ("tags", "<think>hm</think><search> who? </search>", [("search", {"query": "who?"})]),
        ("tags", "<search>a</search><python>1<2</python>", [("search", {"query": "a"}), ("python", {"code": "1<2"})]),
        ("tags", "<answer>4</answer> </search>", []),
        ("tags", "<search><search>a</search>", [("search", {"query": "<search>a"})]),
    ],
)
def test_calls_are_found(syntax, text, expected):
    assert calls(syntax, text) == expected


@pytest.mark.parametrize(
    ("syntax", "text", "words"),
    [
        ("hermes", "<tool_call>" + CALL, "no </tool_call>"),
        ("hermes", block("add(1, 2)"), "not valid JSON"),
        ("hermes", block(""), "not valid JSON"),
        ("hermes", block("[1]"), "must be a JSON object with the name"),
        ("hermes", block('{"name": 1}'), "must be a JSON object with the name"),
        ("hermes", block('{"name": "a", "arguments": "x"}'), "arguments must be"),
        ("hermes", block('{"name": "a", "name": "b"}'), "twice"),
        ("hermes", block('{"name": "a", "arguments": {"x": 1, "x": 2}}'), "twice"),
        ("hermes", block('{"name": "a", "arguments": {"x": NaN}}'), "not a finite number"),
        ("hermes", block('{"name": "a", "arguments": {"x": -Infinity}}'), "not a finite number"),
        ("hermes", block('{"name": "a", "arguments": {"x": 1e999}}'), "not a finite number"),
        ("hermes", block('{"name": "a", "arguments": {"x": ' + "9" * 10_000 + "}}"), "not valid JSON"),
        ("hermes", block("[" * 100_000), "too deep"),
        ("hermes", block('{"a":' * 100_000), "too deep"),
        ("hermes", block('{"name": "a", "arguments": {"x": ' + "[" * 900 + "]" * 900 + "}}"), "nested more than"),
        ("hermes", block(CALL + CALL), "not valid JSON"),
        ("llama3", '{"name": "add", "parameters": ', "not valid JSON"),
        ("llama3", '{"name": "add", "parameters": {}} and more', "text after"),
        ("llama3", "<|python_tag|>print(1)", "not valid JSON"),
        ("tags", "<search>who", "no </search>"),
    ],
)
def test_what_is_no_call_is_said_to_the_policy(syntax, text, words):
    (found,) = find_calls(syntax, text, ARGUMENTS)
    assert isinstance(found, BadCall) and words in found.detail and len(found.detail) < 300


@pytest.mark.parametrize(
    ("syntax", "one"),
    [("hermes", block(CALL)), ("llama3", '{"name": "a", "parameters": {}};'), ("tags", "<search>a</search>")],
)
def test_a_turn_may_have_so_many_calls(syntax, one):
    found = find_calls(syntax, one * 10_000, ARGUMENTS)
    assert [type(call) for call in found] == [ToolCall] * MAX_CALLS + [BadCall] * MAX_CALLS


@pytest.mark.parametrize("syntax", ["hermes", "llama3", "tags"])
@pytest.mark.parametrize("text", ["<search>", "<tool_call>", '{"name": ', "<", "</search>", "<|python_tag|>", "\ud800"])
def test_long_text_takes_no_more_than_linear_time(syntax, text):
    """Tests that long text is searched in a few seconds; in quadratic time it would take minutes."""
    began = time.process_time()
    find_calls(syntax, text * 200_000, ARGUMENTS)
    assert time.process_time() - began < 5
