"""Tests policies that call tools through the service: results, mistakes of the policy, and failures of tools."""

import asyncio
import json
import typing

import pytest
from lockstep.reward.v1 import environment_pb2 as pb

from services.common.errors import InvalidInput
from services.reward.environments.base import BadArgumentsError
from services.reward.environments.functions import function_schema
from services.reward.environments.tools import compute, find_fault
from tests.reward.environments import user_tools
from tests.trainer.harness_processes import marked

CALCULATOR = {"kind": "calculator"}


def functions(*names: str) -> list[dict[str, str]]:
    return [{"kind": "function", "path": f"user_tools:{name}"} for name in names]


def hermes(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def texts(response: pb.StepResponse) -> list[tuple[str, str, str]]:
    assert not response.HasField("failure"), response.failure.message
    return [(message.role, message.name, message.content) for message in response.messages]


def failure(response: pb.StepResponse) -> str:
    name = pb.EnvironmentFailureReason.Name(response.failure.reason)
    return name.removeprefix("ENVIRONMENT_FAILURE_REASON_") if response.HasField("failure") else ""


async def test_an_episode_calls_and_ends_with_the_turn_that_calls_nothing(service):
    opened = await service.open(kind="tools", tools=[CALCULATOR, *functions("weather", "add")])
    assert opened.environment.startswith("tools 1/calculator-1,functions-") and list(opened.roles) == ["tool"]
    schemas = [tool["function"] for tool in json.loads(opened.tools_json)]
    assert [schema["name"] for schema in schemas] == ["calculator", "weather", "add"]
    assert not (await service.reset()).messages
    text = (
        hermes("weather", city="Oslo", days=2) + hermes("calculator", expression="2**10") + hermes("add", numbers=[1])
    )
    first = await service.step(0, f"Let me see. {text}")
    assert texts(first) == [
        ("tool", "weather", '{"city": "Oslo", "days": 2, "unit": "C"}'),
        ("tool", "calculator", "1024"),
        ("tool", "add", "sum: 1"),
    ]
    assert [call.name for call in first.tool_calls] == ["weather", "calculator", "add"]
    assert (first.done, first.reward) == (False, 0.0)
    last = await service.step(1, "The answer is 1024.")
    assert (last.done, texts(last), list(last.tool_calls)) == (True, [], [])


WRONG_CALLS = [
    (hermes("wether"), "there is no tool 'wether': there are calculator, weather, add"),
    (hermes("weather"), "missing argument city"),
    (hermes("weather", city="Oslo", country="no"), "unknown argument 'country'"),
    (hermes("weather", city=1), "argument city must be string"),
    (hermes("weather", city="Oslo", days=True), "argument days must be integer"),
    (hermes("weather", city="Oslo", unit="K"), "argument unit must be one of C, F"),
    (hermes("weather", city="Atlantis"), "no such city"),
    (hermes("add", numbers=["1"]), "argument numbers must be array of number"),
    (hermes("add", numbers=[]), "nothing to add"),
    (hermes("calculator", expression="1/0"), "division by zero"),
    ("<tool_call>add(1)</tool_call>", "not valid JSON"),
]


async def test_a_wrong_call_is_the_policys_to_hear_of(service):
    await service.open(kind="tools", tools=[CALCULATOR, *functions("weather", "add")])
    for call, words in WRONG_CALLS:
        await service.reset(words)
        answer = await service.step(0, call, words)
        ((_, _, text),) = texts(answer)
        assert text.startswith("error: ") and words in text and not answer.done, call
        assert texts(await service.step(1, hermes("calculator", expression="1+1"), words)) == [
            ("tool", "calculator", "2")
        ]


async def test_a_tool_that_fails_is_no_observation(service):
    reasons = {
        "give up": "REFUSED",
        "memory": "CRASHED",
        "exit": "CRASHED",
        "return": "INVALID_REPLY",
        "return inside": "INVALID_REPLY",
        "hang": "TIMEOUT",
    }
    await service.open(kind="tools", tools=functions("breaks"))
    for how, reason in reasons.items():
        if how == "hang":
            await service.open(kind="tools", tools=functions("breaks"), turn_s=2.0)
        await service.reset(how)
        assert failure(await service.step(0, hermes("breaks", how=how), how)) == reason, how


RAISED = {
    "raise": "RuntimeError: a bug",
    "sql": 'OperationalError: near "SELEC": syntax error',
    "key": "KeyError: 'missing'",
    "stop": "StopIteration: ",
    "assert": "AssertionError: ",
    "exit": "SystemExit: bad arguments",
    "value": "no such value",
    "empty": "ValueError: ",
    "long": "RuntimeError: " + "x" * 986,
}


@pytest.mark.parametrize("name", ["raises", "raises_later"])
async def test_whatever_a_function_raises_is_told_to_the_policy_counted_and_logged_once(service, caplog, name):
    await service.open(kind="tools", tools=functions(name, "echo"))
    await service.reset()
    for turn, (how, text) in enumerate(RAISED.items()):
        answer = await service.step(turn, hermes(name, how=how) + hermes(name, how=how) + hermes("echo", text="a"))
        if (how, name) == ("stop", "raises_later"):  # Python raises this instead
            text = "RuntimeError: coroutine raised StopIteration"
        assert texts(answer) == [("tool", name, f"error: {text}")] * 2 + [("tool", "echo", "a")]
        assert (answer.num_calls, answer.num_failed_calls, answer.done) == (3, 2, False)
    tracebacks = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all("user_tools.py" in one for one in tracebacks)
    (of_sql,) = [one for one in tracebacks if "OperationalError" in one]
    assert of_sql.startswith(f"tool {name} raised OperationalError") and "in _raise" in of_sql
    assert len([one for one in tracebacks if "raised RuntimeError" in one]) == 1
    outcomes = {how: service.metric("lockstep_reward_tool_calls_total", outcome=how) for how in ("ok", "KeyError")}
    assert outcomes == {"ok": len(RAISED), "KeyError": 2}


async def test_malformed_and_refused_calls_are_counted(service):
    await service.open(kind="tools", tools=[CALCULATOR])
    await service.reset()
    good, bad = hermes("calculator", expression="1"), hermes("calculator", expression="a")
    answer = await service.step(0, good + bad + hermes("nothing") + "<tool_call>{</tool_call>")
    assert (answer.num_calls, answer.num_failed_calls) == (4, 3)
    names = ("ok", "refused", "malformed")
    assert [service.metric("lockstep_reward_tool_calls_total", outcome=name) for name in names] == [1, 2, 1]


NO_TEXT = {
    "bytes": "caf\ufffd",
    "none": "null",
    "nan": '{"a": NaN, "b": Infinity}',
    "numpy": '{"a": [[1, 2]], "b": 1.5, "c": true}',
    "date": '["2026-01-02", "1.50", "caf\ufffd"]',
    "keys": "{(1, 2): 3}",
    "inside itself": "[[...]]",
    "surrogate": '["?"]',
    "set": '"{1}"',
    "huge": "error: Exceeds the limit (4300 digits) for integer string conversion; use "
    "sys.set_int_max_str_digits() to increase the limit",
}


async def test_results_that_are_no_text(service):
    await service.open(kind="tools", tools=functions("returns"))
    await service.reset()
    for turn, (how, text) in enumerate(NO_TEXT.items()):
        assert texts(await service.step(turn, hermes("returns", how=how))) == [("tool", "returns", text)]


@pytest.mark.parametrize("piece", marked(["a", '"', "\0", "漢", "🎉", "\ud800"], long=["a", '"', "漢", "\ud800"]))
async def test_a_result_that_is_too_long_is_cut_and_not_a_failure(service, piece):
    await service.open(kind="tools", tools=functions("repeat"))
    await service.reset()
    for turn, times in enumerate((1 << 17, 1 << 23)):
        ((_, _, text),) = texts(await service.step(turn, hermes("repeat", text=piece, times=times)))
        shown, mark = "?" if piece == "\ud800" else piece, "\n[... cut ...]\n"
        assert text.replace(mark, "") == shown * (len(text) - len(mark) * (mark in text))
        assert (mark in text) == (turn == 1) and len(text) >= 1 << 17


async def test_an_integer_may_be_written_as_a_float_and_a_default_as_null(service):
    await service.open(kind="tools", tools=functions("weather", "typed"))
    await service.reset()
    ((_, _, text),) = texts(await service.step(0, hermes("weather", city="Oslo", days=3.0, unit=None)))
    assert text == '{"city": "Oslo", "days": 3, "unit": "C"}'
    ((_, _, text),) = texts(await service.step(1, hermes("typed", ids=[1.0, 2], level=2.0, label=None, number=3.0)))
    assert text == "[1, 2] 2 None 3.0"
    parameters = function_schema(user_tools.typed)["function"]["parameters"]
    for arguments in ({"ids": [1.5]}, {"ids": None}, {"ids": [1], "level": 2.5}, {"ids": [True]}):
        assert find_fault(arguments, parameters).startswith("argument ")


async def test_xml_calls_are_typed_by_the_schema(service):
    await service.open(kind="tools", tools=functions("weather", "typed"), syntax="qwen3_coder")
    await service.reset()
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n123\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=typed>\n<parameter=ids>\n[1, 2]\n</parameter>\n"
        "<parameter=label>\n</tool_call>\n</parameter>\n</function>\n</tool_call>"
    )
    answer = await service.step(0, text)
    results = ['{"city": "123", "days": 2, "unit": "C"}', "[1, 2] 1 </tool_call> 0.5"]
    assert [text for _, _, text in texts(answer)] == results
    assert json.loads(answer.tool_calls[0].arguments_json) == {"city": "123", "days": 2}
    wrong = "<parameter=city>A</parameter><parameter=days>two</parameter>"
    wrong = f"<tool_call><function=weather>{wrong}</function></tool_call>"
    assert texts(await service.step(1, wrong))[0][2] == "error: argument days must be integer"


async def test_tools_that_are_only_thought_of_are_not_called(service):
    await service.open(kind="tools", tools=[CALCULATOR])
    call = hermes("calculator", expression="6*7")
    turns = [
        (f"<think>I could {call}.</think>No.", False, []),
        (f"<think>No <tool_call>.</think>{call}", False, ["42"]),
        (f"I could {call}.</think>No.", True, []),
        (call, True, []),
        (call, False, ["42"]),
    ]
    for number, (text, is_reasoning, results) in enumerate(turns):
        await service.reset(str(number))
        answer = await service.step(0, text, str(number), is_reasoning=is_reasoning)
        assert [text for _, _, text in texts(answer)] == results and answer.done == (not results)
    await service.close_run()
    await service.open(kind="tools", tools=[CALCULATOR], reasoning_tags=[])
    await service.reset()
    assert [text for _, _, text in texts(await service.step(0, f"<think>I {call}"))] == ["42"]


async def test_text_that_utf8_cannot_hold_breaks_nothing(service):
    await service.open(kind="tools", tools=functions("echo"))
    await service.reset()
    assert texts(await service.step(0, hermes("echo", text="a\ud800b"))) == [("tool", "echo", "a?b")]
    ((_, name, text),) = texts(await service.step(1, hermes("\ud800")))
    assert name == "?" and "no tool" in text


async def test_tags_return_raw_text(service):
    opened = await service.open(kind="tools", tools=[CALCULATOR], syntax="tags", result_tag="information")
    assert (opened.tools_json, list(opened.roles)) == ("", [])
    await service.reset()
    answer = await service.step(0, "<think>hm</think><calculator> 6*7 </calculator>")
    assert texts(answer) == [("", "", "\n\n<information>42</information>\n\n")]
    assert (await service.step(1, "<answer>42</answer>")).done


async def test_llama3_and_tags_without_a_result_tag(service):
    await service.open(kind="tools", tools=[CALCULATOR], syntax="llama3")
    await service.reset()
    call = '{"name": "calculator", "parameters": {"expression": "6*7"}}'
    assert texts(await service.step(0, call)) == [("tool", "calculator", "42")]
    await service.open(kind="tools", tools=[CALCULATOR], syntax="tags")
    await service.reset()
    assert texts(await service.step(0, "<calculator>1</calculator>")) == [("tool", "calculator", "1")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": functions("missing")}, "no attribute 'missing'"),
        ({"tools": functions("takes_anything")}, "must be given by name"),
        ({"tools": functions("takes_bytes")}, "of a type of JSON"),
        ({"tools": functions("add"), "syntax": "tags"}, "needs one argument"),
        ({"tools": [CALCULATOR, CALCULATOR]}, "same name"),
        ({"tools": functions("think"), "syntax": "tags"}, "one of environment.reasoning_tags"),
        ({"tools": [CALCULATOR], "reasoning_tags": ["<think>", ""]}, "two different texts"),
        ({"tools": [CALCULATOR], "reasoning_tags": ["##", "##"]}, "two different texts"),
        ({"tools": [{"kind": "search", "corpus": "/no/such/file.parquet"}]}, "file.parquet"),
        ({"tools": [{"kind": "python", "timeout_s": 9}], "turn_s": 9}, "must be below turn_s"),
    ],
)
async def test_tools_that_cannot_be_offered_are_refused_when_the_run_opens(service, settings, words):
    with pytest.raises(InvalidInput, match=words):
        await service.open(kind="tools", **settings)


def test_a_schema_comes_from_signature_and_docstring():
    schema = function_schema(user_tools.weather)
    assert schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecasts the weather.\n\nOf any city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, in English."},
                    "days": {"type": "integer", "description": "Number of days."},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    }
    parameters = function_schema(user_tools.add)["function"]["parameters"]
    assert parameters["properties"]["label"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert not find_fault({"numbers": [1, 2.5], "label": None}, parameters)
    assert find_fault({"numbers": [1], "label": 1}, parameters) == "argument label must be string or null"


def test_types_without_arguments_and_meanings_of_annotations_are_in_the_schema():
    def tool(items: typing.List, facts: typing.Dict, days: typing.Annotated[int, "Number of days."] = 1) -> str:  # noqa: UP006
        """Args:
        items: What to sort.
        """

    function = function_schema(tool)["function"]
    assert function["description"] == ""
    assert function["parameters"]["properties"] == {
        "items": {"type": "array", "description": "What to sort."},
        "facts": {"type": "object"},
        "days": {"type": "integer", "description": "Number of days."},
    }


def test_the_parameter_of_a_type_that_is_not_of_json_is_named():
    def tool(when: complex) -> str: ...

    with pytest.raises(TypeError, match="when of tool: <class 'complex'>"):
        function_schema(tool)


@pytest.mark.parametrize(
    ("expression", "value"),
    [(" (3 + 4) * 2 ", "14"), ("7 / 2", "3.5"), ("-7 // 2", "-4"), ("7 % 4", "3"), ("2**-1", "0.5"), ("1e3", "1000.0"),
     ("2**2047", str(2**2047)), ("+-+1", "-1")],
)  # fmt: skip
def test_arithmetic_is_computed(expression, value):
    assert str(compute(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "a", "f(1)", "(1).real", "[1]", "'a' * 9", "True", "1j", "1 if 1 else 2", "1 < 2", "1, 000", "1;2",
     "1/0", "0**-1", "2**4097", "9**9**9**9", "1e308*10", "1e999", "(-8)**0.5", "10.0**400", "2**4000*2**4000",
     "-" * 999 + "1", "(" * 400 + "1" + ")" * 400, "1+" * 300 + "1", "1" * 1001, "9" * 999 + "**9", "1\0", "\ud800",
     "(10**1000)/(1e-300)", "__import__('os')", "lambda: 1", "1e-400**-1"],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_refused_at_once(expression):
    with pytest.raises(BadArgumentsError):
        compute(expression)


async def test_programs_run_in_the_sandbox(service):
    tool = {"kind": "python", "timeout_s": 8, "max_output_chars": 200}
    opened = await service.open(kind="tools", tools=[tool], turn_s=600)
    assert opened.environment.startswith("tools 1/python-")
    await service.reset()
    programs = {
        "print(6 * 7)": "42\n",
        "import sys; print('é'); sys.stderr.write('oh'); sys.exit(3)": "é\noh\nerror: exit status 3",
        "import socket; socket.socket()": "PermissionError",
        "1/0": "ZeroDivisionError: division by zero\n\nerror: exit status 1",
        "print('a' * 50 + 'b' * 100_000 + 'c' * 50)": "a" * 50 + "b" * 50 + "\n[... cut ...]\n" + "b" * 49 + "c" * 50,
        "print('é' * 150)": "é" * 150 + "\n",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)": "error: the program was stopped",
        "input()": "EOFError",
        "\ud800": "error: exit status 1",
    }
    for turn, (program, expected) in enumerate(programs.items()):
        ((_, _, text),) = texts(await service.step(turn, hermes("python", code=program)))
        assert expected in text, program
        assert len(text) < 300


async def test_a_program_that_does_not_end_is_the_policys_fault(service):
    await service.open(kind="tools", tools=[{"kind": "python", "timeout_s": 0.5, "max_output_chars": 60}], turn_s=600)
    await service.reset()
    ((_, _, text),) = texts(await service.step(0, hermes("python", code="print(1, flush=True)\nwhile True: pass")))
    assert text.endswith("error: timed out after 0.5 s") or text.startswith("error: the program was stopped")
    flood = "import os\nwhile os.fork() or True: print('a' * 1000, flush=True)"
    ((_, _, text),) = texts(await service.step(1, hermes("python", code=flood)))
    assert "error: " in text and len(text) < 400


@pytest.mark.long
async def test_slow_programs_of_a_turn_share_its_time_and_none_drops_the_episode(service):
    tool = {"kind": "python", "timeout_s": 1.5, "max_concurrent": 1}
    await service.open(kind="tools", tools=[tool], turn_s=2.0)
    for episode in ("one", "other"):
        await service.reset(episode)
    four = hermes("python", code="while True: pass") * 4
    answers = await asyncio.gather(*(service.step(0, four, episode) for episode in ("one", "other")))
    for answer in answers:
        assert len(texts(answer)) == 4
        for _, _, text in texts(answer):
            assert text.endswith("error: timed out after 0.5 s") or text.startswith("error: the program was stopped")
