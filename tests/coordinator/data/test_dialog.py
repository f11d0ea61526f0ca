"""Tests which part of a turn is reasoning, as the tokens and templates of real model families have it."""

import pytest
import tokenizers
from lockstep.reward.v1.environment_pb2 import Message

from services.common.errors import InvalidInput
from services.common.tool_syntax import ToolCall, find_calls
from services.coordinator.data.dialog import Dialog, decode_completions
from services.coordinator.data.prompts import Prompt
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.fake_services import make_config
from tests.coordinator.text.bridge_families import FAMILIES, make_tokenizer

QUESTION = {"role": "user", "content": "How many clips? Write <think> first."}
CALL = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'


TOOLS = {"kind": "tools", "tools": [{"kind": "calculator"}]}


def make_dialog(tokenizer: Tokenizer, **environment: object) -> Dialog:
    settings = environment if "kind" in environment else {**TOOLS, **environment}
    return Dialog(tokenizer, (), make_config(environment=settings))


@pytest.mark.parametrize(
    ("name", "variables", "opens"),
    [
        ("qwen3-moe-thinking", {}, True),
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("qwen2.5", {}, False),
        ("llama-3.1", {}, False),
        ("mistral-v0.3", {}, False),
    ],
)
def test_the_template_says_whether_a_turn_begins_within_reasoning(name, variables, opens):
    tokenizer = FAMILIES[name].tokenizer()
    tokens = tokenizer.encode(tokenizer.render([QUESTION], **variables))
    assert make_dialog(tokenizer).opens_reasoning(tokens) is opens
    assert make_dialog(tokenizer, reasoning_tags=[]).opens_reasoning(tokens) is False


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("Question. Assistant: <think>\n", True),
        ("<think>Hm.</think>", False),
        ("<think> comes first.", False),
        ("", False),
    ],
)
def test_a_prompt_of_raw_text_says_it_too(prompt, opens):
    tokenizer = make_tokenizer(None)
    assert make_dialog(tokenizer).opens_reasoning(tokenizer.encode(prompt)) is opens
    spelled = make_dialog(tokenizer, reasoning_tags=["<reason>", "</reason>"])
    assert spelled.opens_reasoning(tokenizer.encode(prompt.replace("think>", "reason>"))) is opens


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_tags_that_are_special_tokens_stay_in_the_text_of_a_turn(kind):
    tokenizer = FAMILIES["qwen3"].tokenizer(kind)
    said = f"<think>\nHm, {CALL}\n</think>\n\nNo.<think></think>"
    turn = [*tokenizer.encode(said), *tokenizer.encode("<|im_end|>")]
    assert "<think>" not in tokenizer.decode(turn), "these are special tokens here"
    assert make_dialog(tokenizer).text(turn).replace(" ", "") == said.replace(" ", "")
    assert make_dialog(tokenizer, reasoning_tags=[]).text(turn) == tokenizer.decode(turn)
    assert make_dialog(tokenizer).text([]) == ""
    (scored,) = decode_completions([turn], tokenizer)
    assert scored.replace(" ", "") == said.replace(" ", "")


@pytest.mark.parametrize("settings", [{}, {"syntax": "qwen3_coder"}, {"kind": "agent", "path": "m:f"}])
def test_tags_of_calls_that_are_special_tokens_stay_too(settings):
    backend = tokenizers.Tokenizer.from_str(make_tokenizer(None)._backend.to_str())
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = Tokenizer(backend, None, (0,))
    turn = tokenizer.encode(f"Hm.\n{CALL}")
    assert "<tool_call>" not in tokenizer.decode(turn)
    assert find_calls("hermes", make_dialog(tokenizer, **settings).text(turn), {}) == [ToolCall("search", {})]
    assert "<tool_call>" not in make_dialog(tokenizer, syntax="llama3").text(turn)


def test_results_within_a_turn_need_what_stops_the_turn():
    settings = {**TOOLS, "syntax": "tags", "result_tag": "result"}
    for sampling in ({}, {"stop": ["</calculator>"]}):
        config = make_config(environment=settings, rollout={"sampling": {"max_tokens": 8, **sampling}})
        dialog = Dialog(make_tokenizer(None), (), config)
        if sampling:
            dialog.check([])
            continue
        with pytest.raises(InvalidInput, match=r'such as \["</search>"\]') as caught:
            dialog.check([])
        assert caught.value.metadata == {"field": "rollout.sampling.stop"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [((), "Go to the door."), ((Message(content=" It is locked."),), "Go to the door. It is locked.")],
)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_first_prompt_has_the_text_that_the_model_reads(kind, messages, text):
    tokenizer = make_tokenizer(None, kind=kind)
    own = "Go to the door."
    row = Prompt("0", own, tuple(tokenizer.encode(own)), None, {}, ({"role": "", "content": own},), row_prompt=own)
    first = make_dialog(tokenizer).begin(row, messages)
    assert (first.text, tokenizer.decode(list(first.tokens)).strip()) == (text, text)
    assert first.row_prompt == own


def test_the_first_prompt_with_messages_of_roles_is_rendered_again():
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    rendered = tokenizer.render([QUESTION])
    row = Prompt("0", rendered, tuple(tokenizer.encode(rendered)), None, {}, (QUESTION,), row_prompt=(QUESTION,))
    first = make_dialog(tokenizer).begin(row, (Message(role="user", content="Room 4."),))
    assert first.text == tokenizer.render([QUESTION, {"role": "user", "content": "Room 4."}])


def with_tokens(*tokens: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0}, unk_token="</s>"))
    backend.add_tokens(list(tokens))
    return Tokenizer(backend, None, (0,))


def test_tags_that_do_not_fit_the_model_are_refused_at_the_start():
    magistral = with_tokens("[THINK]", "[/THINK]")
    with pytest.raises(
        InvalidInput, match=r'set environment.reasoning_tags to \["\[THINK\]", "\[/THINK\]"\]'
    ) as caught:
        make_dialog(magistral).check([])
    assert caught.value.metadata == {"field": "environment.reasoning_tags"}
    make_dialog(magistral, reasoning_tags=["[THINK]", "[/THINK]"]).check([])
    make_dialog(magistral, reasoning_tags=["<think>", "</think>"]).check([])
    make_dialog(with_tokens("[THINK]", "[/THINK]", "<think>", "</think>")).check([])
    make_dialog(with_tokens()).check([])
    python = make_config(environment={"kind": "python", "path": "m:C"})
    Dialog(magistral, (), python).check([])


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("most", range(1, 13))
def test_a_message_that_is_cut_has_whole_characters_and_no_more_tokens(kind, most):
    tokenizer, text = FAMILIES["qwen2.5"].tokenizer(kind), "漢字 costs 5 € 🎉"
    tokens = make_dialog(tokenizer, max_message_tokens=most).reply((), [Message(content=text)])
    assert len(tokens) <= most and text.startswith(tokenizer.decode(tokens).strip())


def test_a_result_that_is_cut_stays_within_its_tag():
    tokenizer = FAMILIES["qwen2.5"].tokenizer("byte-level")
    config = make_config(
        environment={**TOOLS, "syntax": "tags", "result_tag": "result", "max_message_tokens": 24},
        rollout={"sampling": {"stop": ["</a>"]}},
    )
    text = f"\n\n<result>{'a long page ' * 20}</result>\n\n"
    tokens = Dialog(tokenizer, (), config).reply((), [Message(content=text)])
    shown = tokenizer.decode(tokens)
    assert len(tokens) <= 24 and shown.strip().startswith("<result>a long") and shown.endswith("</result>\n\n")
