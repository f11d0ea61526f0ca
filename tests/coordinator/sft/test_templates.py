"""Tests SFT rows with the chat templates of model families, and with their two kinds of tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.supervised import Example, SftDataset
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.text.bridge_families import FAMILIES, make_tokenizer

CASES = [(name, kind) for name, family in FAMILIES.items() for kind in family.kinds]
QUESTION = {"role": "user", "content": "How many clips?"}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Example]:
    """Returns the example that the first row becomes."""

    def load(tokenizer: Tokenizer, *rows: dict[str, Any], **config: Any) -> Example:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        settings = {"train": path, "samples_per_step": 1, **config}
        return SftDataset.load(SftDataConfig(**settings), tokenizer, seed=0).examples[0]

    return load


def read(tokenizer: Tokenizer, tokens: Any) -> str:
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_answer_has_the_tokens_that_it_has_in_the_conversation(load: Callable, name: str, kind: str) -> None:
    tokenizer = FAMILIES[name].tokenizer(kind)
    example = load(tokenizer, {"prompt": QUESTION["content"], "response": "So half as many."}, chat=True)
    assert example.prompt_tokens.tolist() == tokenizer.encode(tokenizer.render([QUESTION]))
    whole = [*example.prompt_tokens.tolist(), *example.tokens.tolist()]
    messages = [QUESTION, {"role": "assistant", "content": "So half as many."}]
    rendered = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False))
    assert rendered[: len(whole)] == whole
    assert whole[-1] in tokenizer.eos_token_ids and example.loss_mask.all()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_response_continues_its_prompt(load: Callable, kind: str) -> None:
    tokenizer = make_tokenizer(None, kind=kind)
    example = load(tokenizer, {"prompt": "Q: clips? A:", "response": "half"})
    assert example.prompt_tokens.tolist() == tokenizer.encode("Q: clips? A:")
    assert read(tokenizer, example.tokens) == "half</s>"
    with pytest.raises(InvalidInput, match="line 2: the prompt is a list, but the file's first one is text: set data"):
        load(tokenizer, {"prompt": "Q", "response": "A"}, {"prompt": [QUESTION], "response": "half"})


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_of_two_end_tokens_that_a_template_writes_the_first_is_trained_on(load: Callable, kind: str) -> None:
    tokenizer = FAMILIES["phi-3"].tokenizer(kind)
    said = "A turn ends with <|end|> or <|endoftext|> here."
    example = load(tokenizer, {"prompt": "How?", "response": said}, chat=True)
    assert read(tokenizer, example.tokens).strip() == said + "<|end|>" and example.loss_mask.all()
    assert [token in tokenizer.eos_token_ids for token in example.tokens].index(True) == len(example.tokens) - 1
    with pytest.raises(InvalidInput, match="answer 0 has 3 end tokens"):
        load(tokenizer, {"prompt": "How?", "response": "Yes.<|end|>"}, chat=True)


def test_the_arguments_of_a_call_may_quote_an_end_token(load: Callable) -> None:
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "What is <|im_end|>?"}}}
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    example = load(tokenizer, {"messages": messages}, messages_column="messages")
    text = tokenizer.render(messages, add_generation_prompt=False).removesuffix("\n")
    assert read(tokenizer, example.prompt_tokens) + read(tokenizer, example.tokens) == text
    assert example.tokens.tolist().count(example.tokens[-1]) == 1


THOUGHT = {"prompt": "How?", "response": "<think>\nI should greet.\n</think>\n\nHello."}
# Like Llama-3.1-Nemotron-Nano's, it writes no thinking.
FORGETFUL = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("name", FAMILIES)
def test_thinking_is_trained_on_unless_the_prompt_has_its_beginning(load: Callable, name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    example = load(tokenizer, THOUGHT, chat=True)
    said = THOUGHT["response"].removeprefix("<think>\n" if name.endswith("thinking") else "")
    assert read(tokenizer, example.tokens).lstrip().startswith(said) and example.loss_mask.all()


def test_an_answer_of_which_the_template_leaves_out_a_part_is_bad(load: Callable) -> None:
    tokenizer = make_tokenizer(FORGETFUL, eos=("<|im_end|>",))
    with pytest.raises(InvalidInput, match=r"leaves out or changes a part of answer 0, '<think>.* data.chat_template"):
        load(tokenizer, THOUGHT, chat=True)
    assert read(tokenizer, load(tokenizer, {"prompt": "How?", "response": "Hello."}, chat=True).tokens).endswith("d|>")
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "clips"}}}
    messages = [QUESTION, {"role": "assistant", "content": "I will look.", "tool_calls": [call]}]
    with pytest.raises(InvalidInput, match=r"part of answer 0, 'I will look\.'"):  # Llama 3.1 writes the call alone
        load(FAMILIES["llama-3.1"].tokenizer(), {"messages": messages}, messages_column="messages")
    with pytest.raises(InvalidInput, match=r"leaves out the calls of message 1: .*, or remove tool_calls"):
        load(tokenizer, {"messages": messages}, messages_column="messages")
    for key in ("reasoning_content", "thinking"):
        messages = [QUESTION, {"role": "assistant", "content": "4", key: "2 and 2", "reasoning": None}]
        with pytest.raises(InvalidInput, match=f"leaves out the reasoning of message 1: .*, or remove {key}"):
            load(tokenizer, {"messages": messages}, messages_column="messages")
    tokenizer, thought = FAMILIES["qwen2"].tokenizer(), "<think>\n2 and 2\n</think>\n\n4"
    messages = [QUESTION, {"role": "assistant", "content": thought, "reasoning": "2 and 2"}]
    example = load(tokenizer, {"messages": messages}, messages_column="messages")
    assert read(tokenizer, example.tokens) == f"{thought}<|im_end|>"


def test_a_message_that_the_template_leaves_out_is_bad(load: Callable) -> None:
    brief = {"role": "developer", "content": "Be brief."}
    row = {"messages": [brief, QUESTION, {"role": "assistant", "content": "4"}]}
    example = load(FAMILIES["qwen2"].tokenizer(), row, messages_column="messages")
    assert "Be brief." in read(FAMILIES["qwen2"].tokenizer(), example.prompt_tokens)
    with pytest.raises(InvalidInput, match="leaves out a message of role developer: give it another role, or set"):
        load(FAMILIES["qwen3"].tokenizer(), row, messages_column="messages")
