"""Tests tool calls in the policy's text, well-formed and hostile."""

import json
import re
import time
from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.common.tool_syntax import MAX_CALLS, THINK, BadCall, find_calls, read_texts
from services.reward.environments.base import ToolCall, Turn
from tests.trainer.harness_processes import few_of

ARGUMENTS = {"search": "query", "python": "code"}


def calls(syntax: str, text: str) -> list[object]:
    """Returns the calls that are found: (name, arguments) of each, or the error message of a bad one."""
    found = find_calls(syntax, text, ARGUMENTS)
    return [call.detail if isinstance(call, BadCall) else (call.name, call.arguments) for call in found]


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


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
        ("hermes", block('{"name": "w", "arguments": {"t": "a </tool_call> b"}}'), [("w", {"t": "a </tool_call> b"})]),
        ("hermes", block('{"name": "w", "arguments": {"t": "a <tool_call> b"}}'), [("w", {"t": "a <tool_call> b"})]),
        ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", ["the call has no </tool_call>", ADD]),
        ("hermes", f"I call <tool_call> now: <tool_call>{CALL}</tool_call>", ["the call has no </tool_call>", ADD]),
        ("hermes", f"\u2003{block(CALL)}\u2003", [ADD]),
        ("qwen3_coder", f"I add. {xml('add', a='1', b='x')}", [("add", {"a": "1", "b": "x"})]),
        ("qwen3_coder", xml("now") + xml("now"), [("now", {}), ("now", {})]),
        ("qwen3_coder", xml("f", a="1").replace("\n", ""), [("f", {"a": "1"})]),
        ("qwen3_coder", xml("f", a="x</parameter>\n</function>\ny"), [("f", {"a": "x</parameter>\n</function>\ny"})]),
        ("qwen3_coder", xml("f", a="\n  x\n", b=""), [("f", {"a": "\n  x\n", "b": ""})]),
        ("qwen3_coder", "I use <function=f> and </parameter>.", []),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3", ' <|python_tag|>{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', [("a", {}), ("b", {})]),
        ("llama3", '<|python_tag|>{"name": "now"}', [("now", {})]),
        ("llama3", '{"name": "Alice", "age": 3}', []),
        ("llama3", '<think>hm</think>{"type": "circle", "radius": 2} is it', []),
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
        ("hermes", block("{'name': 'a', 'arguments': {'t': '" + block(CALL) + "'}}"), "not valid JSON"),
        ("hermes", block('{"name": "a", "arguments": {"t": "</tool_call><tool_call>{}", "x": 1e999}}'), "not a finite"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"t": "never closed </tool_call', "no </tool_call>"),
        ("qwen3_coder", block(CALL), "must be followed by <function=NAME>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n", "parameter a must end with </parameter>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n1\n</function>\n</tool_call>", "must come <parameter=NAME>"),
        ("qwen3_coder", xml("f", a="1", A="2").replace("=A>", "=a>"), "set twice"),
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
    [
        ("hermes", block(CALL)),
        ("qwen3_coder", xml("a", b="1")),
        ("llama3", '{"name": "a", "parameters": {}};'),
        ("tags", "<search>a</search>"),
    ],
)
def test_a_turn_may_have_so_many_calls(syntax, one):
    found = find_calls(syntax, one * 10_000, ARGUMENTS)
    assert [type(call) for call in found] == [ToolCall] * MAX_CALLS + [BadCall] * MAX_CALLS


XML = ("<tool_call><function=f><parameter=a>", "<tool_call><function=f></tool_call>", "</parameter>")
# Syntaxes with the marks that they look for, and each mark once.
MARKS = [
    *(("hermes", text) for text in ("<tool_call>", "<tool_call>{", XML[1], "<think>")),
    *(("qwen3_coder", text) for text in (*XML, "<tool_call>")),
    *(("llama3", text) for text in ('{"name": ', "<|python_tag|>", XML[1], "</think>")),
    *(("tags", text) for text in ("<search>", "</search>", "<", "\ud800")),
]


@pytest.mark.parametrize(("syntax", "text"), few_of(MARKS, *map(dict.fromkeys, zip(*MARKS, strict=True))))
def test_long_text_takes_no_more_than_linear_time(syntax, text):
    """Tests that long text is searched in a few seconds; in quadratic time it would take minutes."""
    began = time.process_time()
    find_calls(syntax, text * 200_000, ARGUMENTS)
    assert time.process_time() - began < 5


def render(syntax: str, name: str, arguments: Mapping[str, object]) -> str:
    """Writes a call as chat templates do."""
    if syntax == "hermes":
        return block(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    if syntax == "llama3":
        return json.dumps({"name": name, "parameters": arguments})
    if syntax == "qwen3_coder":
        return xml(name, **{key: str(value) for key, value in arguments.items()})
    return f"<{name}>{arguments[ARGUMENTS[name]]}</{name}>"


PIECES = (
    *("<tool_call>", "</tool_call>", "<search>", "</search>", "<python>", "</python>", "<think>", "</think>", ";"),
    *("<|python_tag|>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", '"', "\\", "{", "}", "\n", "'"),
    *('{"name": "delete", "arguments": {}}', "\0", "\x85", "\u2028", "漢字 🎉"),
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
PROSE = st.text(st.characters(exclude_characters="<{;", exclude_categories=["Cs"]), max_size=20)
# What ends a call of these syntaxes cannot be written in a value, because they have no escapes.
ENDS = {"qwen3_coder": r"</parameter>\s*(<parameter=|</function>\s*</tool_call>)", "search": "</search>"}
THOUGHTS = TEXTS.filter(lambda text: "</think>" not in text)


@settings(max_examples=50, deadline=None)
@given(PROSE, st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), min_size=1, max_size=3), THOUGHTS)
def test_any_arguments_come_back_whatever_tags_they_hold(prose, arguments, thought):
    expected = [("write", one) for one in arguments]
    written = [render("hermes", "write", one) for one in arguments]
    for said in (prose, f"<think>{thought}</think>{prose}"):
        assert calls("hermes", said + prose.join(written) + prose) == expected
    objects = "; ".join(render("llama3", "write", one) for one in arguments)
    for said in ("", "<|python_tag|>", f"<think>{thought}</think>\n\n"):
        assert calls("llama3", said + objects) == expected
    if "</think>" not in objects:
        assert calls("llama3", prose + "I call " + objects) == []


@settings(max_examples=100, deadline=None)
@given(PROSE, st.lists(TEXTS, min_size=1, max_size=3), THOUGHTS)
def test_any_text_comes_back_from_syntaxes_without_escapes(prose, values, thought):
    assume(not any(re.search(ENDS["qwen3_coder"], f"{value}\n</parameter") for value in values))
    for said in (prose, f"<think>{thought}</think>{prose}"):
        written = [render("qwen3_coder", "f", {"a": value, "b": "1"}) for value in values]
        assert calls("qwen3_coder", said + prose.join(written) + prose) == [("f", {"a": v, "b": "1"}) for v in values]
        if not any(ENDS["search"] in value for value in values):
            text = said + prose.join(render("tags", "search", {"query": value}) for value in values) + prose
            assert calls("tags", text) == [("search", {"query": value.strip()}) for value in values]


WRITTEN = {
    "hermes": render("hermes", "delete", {}),
    "qwen3_coder": xml("delete", a="1"),
    "llama3": render("llama3", "delete", {}),
    "tags": "<search>a</search>",
}


@pytest.mark.parametrize(("syntax", "one"), WRITTEN.items())
@pytest.mark.parametrize(
    ("text", "is_reasoning", "count"),
    [
        ("<think>I could {}.</think> No.", False, 0),
        ("<think>{}</think>\n\n{}", False, 1),
        ("I could {}. </think> No.", True, 0),
        ("I could {}. </think> No.", False, 0),
        ("{}</think>{}", False, 1),
        ("{}</think>{}", True, 1),
        ("<think>I could {}", False, 0),
        ("{}", True, 0),
        ("{}", False, 1),
        ("<think>a</think><think>{}</think>{}", False, 1),
        ("<think>{}</think><think>{}</think>", False, 0),
        ("<think>a <think> b {}</think>{}", False, 1),
        ("<think>I write </think> when I have done: {}</think> No.", False, 0),
        ("<think>The tag {}: <tool_call>, <search> or <|python_tag|>.</think> No.", False, 0),
        ("<think>\n\n</think>\n\n{} <think>{}", False, 1),
    ],
)
def test_nothing_is_called_within_reasoning(syntax, one, text, is_reasoning, count):
    found = find_calls(syntax, text.replace("{}", one), ARGUMENTS, is_reasoning=is_reasoning)
    if syntax == "llama3" and text.endswith("{} <think>{}"):
        return  # its calls are the whole answer
    assert len(found) == count and all(isinstance(call, ToolCall) for call in found)


@pytest.mark.parametrize(("syntax", "one"), WRITTEN.items())
def test_other_tags_of_reasoning_and_none(syntax, one):
    text = f"[THINK]{one}[/THINK]{one}"
    assert len(find_calls(syntax, text, ARGUMENTS, ("[THINK]", "[/THINK]"))) == 1
    inside = f"<think>{one}</think>" if syntax != "llama3" else one
    assert len(find_calls(syntax, inside, ARGUMENTS, ())) == 1
    assert find_calls(syntax, f"{one}</think>Hm.", ARGUMENTS, THINK, is_reasoning=True) == []


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(WRITTEN)), TEXTS, st.booleans(), st.sampled_from([(), THINK]))
def test_no_text_breaks_a_parser(syntax, text, is_reasoning, tags):
    for call in find_calls(syntax, text, ARGUMENTS, tags, is_reasoning=is_reasoning):
        assert isinstance(call, ToolCall) or call.detail


@pytest.mark.parametrize(
    ("text", "is_reasoning", "said"),
    [
        (" 4 ", False, " 4 "),
        ("<think>5</think>\n\n4", False, "4"),
        ("5</think>4", True, "4"),
        ("5</think>4", False, "4"),
        ("5", True, ""),
        ("<think>5", False, ""),
        ("4<think>5", False, "4"),
        ("<think>5</think>4<think>5</think>, I say.", False, "4, I say."),
        ("<think>5 <think> 6</think> 7</think> 4", False, "4"),
    ],
)
def test_an_answer_is_what_is_said_outside_of_reasoning(text, is_reasoning, said):
    assert Turn(text, 1, False, is_reasoning).answer(THINK) == said
    assert Turn(text, 1, False, is_reasoning).answer(()) == text
    other = text.replace("<think>", "[T]").replace("</think>", "[/T]")
    assert Turn(other, 1, False, is_reasoning).answer(("[T]", "[/T]")) == said


STRING = {"type": "string"}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        *((text, STRING, text) for text in ("1", "true", "null", "None", '{"a": 1}', '"a"', " a ", "", "\n")),
        *(("1", {"type": kind}, 1) for kind in ("integer", "number")),
        ("2.5", {"type": "number"}, 2.5),
        ("2.5", {"type": "integer"}, "2.5"),
        ("one", {"type": "integer"}, "one"),
        *((text, {"type": "boolean"}, True) for text in ("true", "True", " true\n")),
        ("1", {"type": "boolean"}, "1"),
        ('{"a": [1, null]}', {"type": "object"}, {"a": [1, None]}),
        ('["</parameter>"]', {"type": "array", "items": STRING}, ["</parameter>"]),
        ("[1,", {"type": "array"}, "[1,"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        *((text, OPTIONAL, None) for text in ("null", "None")),
        ("1", OPTIONAL, "1"),
        ('"a"', OPTIONAL, '"a"'),
        ("1", {"type": ["integer", "null"]}, 1),
        ("1", {"enum": [1, 2]}, 1),
        ("C", {"enum": ["C", "F"]}, "C"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {}, 1),
        ("a", {}, "a"),
        ("1", True, 1),
        *(("1", schema, 1) for schema in ({"type": None}, {"enum": None}, {"anyOf": 3}, {"type": {"a": 1}}, None)),
        ("1", {"$ref": "#/$defs/A"}, 1),
        ("a", {"type": "of another server"}, "a"),
    ],
)
def test_texts_are_read_as_the_schema_says(text, schema, value):
    read = read_texts({"a": text}, {"properties": {"a": schema}})["a"]
    assert (read, type(read)) == (value, type(value))
