"""Tests that reward functions written for TRL and verl score unchanged, in the workers of the reward service."""

import logging

import pytest

from services.common.errors import InvalidInput
from services.reward.errors import FailureReason

pytestmark = pytest.mark.usefixtures("functions")

CHAT = [{"role": "user", "content": "2 + 2?"}]
ROW = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": 4}, "extra_info": {"index": 7}}


def scorer(function: str, **fields: object) -> dict:
    return {"kind": "python", "path": f"reward_functions:{function}", **fields}


async def rewards(open_run, function: dict, items: list) -> list[float]:
    async with open_run(function, num_workers=1) as run:
        outcomes = await run.score(items)
    assert not [outcome.failure for outcome in outcomes if outcome.failure]
    return [outcome.reward for outcome in outcomes]


async def test_a_function_of_trl_reads_messages_and_columns(open_run, make_item, caplog):
    caplog.set_level(logging.INFO)
    row = {"extra": {"solution": "4", "prompt": CHAT}, "messages": CHAT}
    items = [make_item(text, **row) for text in ("4", "5", "skip")]
    assert await rewards(open_run, scorer("trl_accuracy"), items) == [1.0, 0.0, 0.0]
    assert "scorer python: reward_functions:trl_accuracy is called with the arguments of TRL" in caplog.text


async def test_an_async_function_of_trl_reads_text_prompts(open_run, make_item):
    items = [make_item(text, "4", extra={"level": 3}) for text in ("4", "four", "so 4")]
    for settings in ({}, {"group": True}):
        function = scorer("trl_shortest", kwargs={"bonus": 0.5}, **settings)
        assert await rewards(open_run, function, items) == [1.5, 0.5, 0.5]


async def test_a_function_of_trl_gets_the_text_that_was_continued(open_run, make_item):
    messages = [*CHAT, {"role": "assistant", "content": "<think>"}]
    items = [make_item(text, messages=messages) for text in ("4", "5")]
    assert await rewards(open_run, scorer("trl_continues"), items) == [1.0, 0.0]


async def test_a_function_of_trl_gets_the_tokens_that_it_takes(open_run, make_item):
    items = [make_item("4", tokens=[19, 2], num_tokens=2), make_item("", num_tokens=0)]
    assert await rewards(open_run, scorer("trl_token_ids"), items) == [21.0, 0.0]
    assert await rewards(open_run, scorer("trl_penalty"), items) == [-2.0, 0.0]
    async with open_run(scorer("trl_token_ids"), num_workers=1) as run:
        assert run.reads_tokens
        (outcome,) = await run.score([make_item("4")])
    assert "takes completion_ids, which what an agent leaves behind does not have" in outcome.failure.detail
    for function in (scorer("trl_token_ids", kwargs={"completion_ids": [[1], [2]]}), {"kind": "exact"}):
        async with open_run(function) as run:
            assert not run.reads_tokens


async def test_what_a_function_of_trl_records_changes_no_reward(open_run, make_item):
    assert await rewards(open_run, scorer("trl_logs"), [make_item("4"), make_item("5")]) == [1.0, 1.0]


async def test_a_function_of_trl_may_have_its_own_setting_named_messages(open_run, make_item):
    function = scorer("trl_own_messages", kwargs={"messages": 3})
    assert await rewards(open_run, function, [make_item(text, messages=CHAT) for text in ("4", "5")]) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("trl_accuracy", {"extra": {"answer": "4"}}, "no column 'solution', which reward_functions:trl_accuracy takes"),
        (
            "trl_lengths",
            {"tokens": [19, 2]},
            "it uses completion_ids, which Lockstep does not pass to a function of TRL without that parameter: add",
        ),
        ("trl_guards", {}, "it uses trainer_state, which"),
        ("trl_accuracy", {}, "or set kwargs; the rows have no further columns"),
        ("trl_accuracy", {"extra": {"gold": "4", "level": 1}}, "or set kwargs; the rows have gold, level"),
        ("compute_score", {"extra": {"extra_info": {}}}, "no column 'data_source'"),
        (
            "verl_async",
            {"extra": {"data_source": ""}},
            "'extra_info', which reward_functions:verl_async takes: list it",
        ),
    ],
)
async def test_what_cannot_be_passed_is_a_failure_that_names_it(open_run, make_item, name, row, words):
    async with open_run(scorer(name), num_workers=1) as run:
        outcomes = await run.score([make_item("4", "4", **row)] * 2)
    assert all(words in outcome.failure.detail for outcome in outcomes)
    reason = (
        FailureReason.INVALID_ANSWER
        if "column" in words or "kwargs" in words or "list it" in words
        else FailureReason.ERROR
    )
    assert {outcome.failure.reason for outcome in outcomes} == {reason}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (scorer("trl_curriculum"), "takes trainer_state, which Lockstep does not pass to a function of TRL"),
        (scorer("verl_with_router"), "takes reward_router_address, which Lockstep does not pass to a function of verl"),
        (scorer("compute_score", group=True), "takes one sample: leave out group"),
    ],
)
async def test_what_can_never_be_passed_is_refused_at_open(open_run, function, words):
    with pytest.raises(InvalidInput, match=words):
        async with open_run(function):
            pass


async def test_a_function_of_verl_gets_the_row_s_own_ground_truth(open_run, make_item):
    items = [make_item(text, "4", extra=ROW) for text in ("4", "5")]
    assert await rewards(open_run, scorer("compute_score"), items) == [1.0, 0.0]
    # Here the number is not the text; an answer is, and kwargs stand for columns that rows do not have.
    function = scorer("verl_async", kwargs={"scale": 2.0, "data_source": "mine", "extra_info": {}})
    assert await rewards(open_run, function, [make_item("4", "4", extra=row) for row in (ROW, {})]) == [0.0, 2.0]


async def test_a_parameter_that_the_config_sets_is_the_functions_own(open_run, make_item, caplog):
    caplog.set_level(logging.INFO)
    function = scorer("own_completions", kwargs={"completions": 3})
    assert await rewards(open_run, function, [make_item("ab"), make_item("a")]) == [6.0, 3.0]
    assert "is called with the arguments of Lockstep" in caplog.text
