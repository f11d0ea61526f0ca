"""Tests that templates which keep earlier turns pass, and others are rejected with the first difference."""

from functools import partial

import pytest

from services.common.errors import InvalidInput
from services.coordinator.text.chat_template import ChatTemplate, TemplateRefusal, check_prefix_stable
from tests.coordinator.conftest import CHATML
from tests.support import raises

# Like Qwen3: thinking is part of the content; only turns after the last question keep it, and the last always has it.
STRIPS_THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- set thinking = '' %}
        {%- set answer = message.content %}
        {%- if '</think>' in message.content %}
            {%- set thinking = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Like Mistral: no header for the assistant, the turn ends with EOS, roles must alternate.
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') == loop.index0 % 2 %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '[INST] ' + message.content + '[/INST]' if message.role == 'user' else ' ' + message.content + eos_token }}
{%- endfor %}"""

# Like early templates: the end of a turn is written only when another begins, and the prompt has an extra space.
LATE_END = """{%- for message in messages %}
    {{- message.role + ': ' + message.content + ('</s>' if loop.last else '\\n') }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
WRONG_HEADER = LATE_END.replace("('</s>' if loop.last else '\\n')", "'\\n'").replace("'assistant:'", "'assistant:  '")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

PLAIN = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": " 2\n"},
    {"role": "user", "content": "+ 1?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "+ 1?"},
]
THINKING = [
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nParis"},
    {"role": "user", "content": "Of Italy?"},
    {"role": "assistant", "content": "<think>\nRome?\n</think>\n\nRome"},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def check(source: str, messages: list[dict], **variables: object) -> None:
    check_prefix_stable(partial(ChatTemplate(source, SPECIAL).render, **variables), messages)


def refused(source: str, messages: list[dict], **variables: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        check(source, messages, **variables)
    assert not isinstance(caught.value, TemplateRefusal)
    assert caught.value.metadata == {"field": "data.chat_template"}
    return caught.value.message


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama-3", "mistral"])
@pytest.mark.parametrize("messages", [PLAIN, THINKING, PLAIN[:2], PLAIN[:1]], ids=["plain", "thinking", "one", "none"])
def test_templates_that_keep_what_they_wrote(source: str, messages: list[dict]):
    check(source, messages)
    if source is not MISTRAL:
        check(source, [SYSTEM, *messages])


def test_a_tokenizer_will_do(tokenizer):
    check_prefix_stable(tokenizer.render, THINKING)
    with raises(InvalidInput, field="data.chat_template"):
        check_prefix_stable(partial(tokenizer.render, enable_thinking=False), THINKING)


def test_stripped_thinking_is_found():
    message = refused(STRIPS_THINKING, THINKING)
    assert "message 1 changes when messages follow: after " in message
    assert r"<|im_start|>assistant\n', expected '<think>\nEasy." in message
    assert "but got 'Paris<|im_end|>" in message
    assert "data.chat_template" in message
    # Even without any thinking: the turn had an empty block while it was the last.
    message = refused(STRIPS_THINKING, PLAIN)
    assert r"expected '<think>\n\n</think>\n\n 2\n" in message
    assert "message 1 changes when messages follow" in message


def test_one_answer_with_thinking_is_stable():
    for messages in (THINKING[:2], [SYSTEM, *THINKING[2:]]):
        check(STRIPS_THINKING, messages)
        # A tool's result is not a question, so the thinking before it stays.
        check(STRIPS_THINKING, [*messages, {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "Done"}])


def test_a_prompt_without_thinking_begins_only_such_an_answer():
    check(STRIPS_THINKING, PLAIN[:2], enable_thinking=False)
    message = refused(STRIPS_THINKING, THINKING[:2], enable_thinking=False)
    assert "message 1 does not begin with its prompt" in message
    assert r"expected '\n</think>\n\n' but got 'Easy." in message
    assert "data.chat_template_kwargs" in message


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (LATE_END, ["message 1 does not begin with its prompt", "expected '</s>assistant:' but got '\\nassistant:  2"]),
        (WRONG_HEADER, ["message 3 does not begin with its prompt", "expected ' ' but got '3\\n'"]),
        # A template whose beginning depends on the number of messages.
        ("{{ messages | length }}" + LLAMA3, ["message 1 does not begin with its prompt", "after '', expected '1<s>"]),
        # Every header is that of the last message: right for the last turn, wrong for earlier ones.
        (
            CHATML.replace("message['role']", "messages[-1]['role']"),
            ["message 1 does not begin with its prompt", "'user", "'assist"],
        ),
    ],
)
def test_broken_templates(source: str, texts: list[str]):
    message = refused(source, PLAIN)
    for text in texts:
        assert text in message


def test_what_a_template_does_not_take_is_its_refusal():
    with raises(TemplateRefusal, field="messages"):
        check(MISTRAL, [SYSTEM, *PLAIN])


def test_a_conversation_may_begin_with_the_assistant():
    check(CHATML, [{"role": "assistant", "content": "Hello."}, *PLAIN])
