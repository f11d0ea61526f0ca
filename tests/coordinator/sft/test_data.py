"""Tests SFT rows: which tokens are trained on, which rows are rejected, and that batches are reproducible."""

import json
import logging
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.batches import SAMPLE_SCHEMA
from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput, NotFound
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.supervised import SftDataset, SftFile
from services.coordinator.text.tokenizer import Tokenizer
from tests.support import raises, write_tokenizer

# The character tokenizer: <pad> 0, <eos> 1, digits from 2, + 12, - 13, = 14, space 15.
EOS = 1
# The header of the assistant's turn is "=", and a space follows its end token, as a line break does in ChatML.
TEMPLATE = """
{%- for m in messages -%}
{{ '=' + m.content + '<eos> ' if m.role == 'assistant' else m.content }}
{%- endfor -%}
{{ '=' if add_generation_prompt }}"""
# Writes the last answer in full but only the first digit of earlier ones, like templates that strip the thinking.
FORGETFUL = TEMPLATE.replace("m.content + '<eos> '", "(m.content if loop.last else m.content[0]) + '<eos> '")

# ChatML with spaces instead of line breaks.
SPACED = """
{%- for m in messages -%}
<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{{ '\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant ' if add_generation_prompt }}"""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TWO_TURNS = [user("2+2"), assistant("4"), user("3+3"), assistant("06")]


@pytest.fixture
def characters(tmp_path: Path) -> Callable[..., Tokenizer]:
    def load(template: str | None = None) -> Tokenizer:
        write_tokenizer(tmp_path)
        path = tmp_path / "template.jinja"
        path.write_text(template or "")
        return Tokenizer.load(tmp_path, chat_template=path if template else None)

    return load


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., SftDataset]:
    """Writes `rows` to a file and loads them as a dataset."""

    def load(tokenizer: Tokenizer, rows: list[dict[str, Any]], **config: Any) -> SftDataset:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        settings = {"train": tmp_path / "rows.parquet", "samples_per_step": 1, "shuffle": False} | config
        return SftDataset.load(SftDataConfig(**settings), tokenizer, seed=0)

    return load


def parts(dataset: SftDataset, index: int = 0) -> tuple[list[int], list[int], list[int]]:
    example = dataset.examples[index]
    return example.prompt_tokens.tolist(), example.tokens.tolist(), example.loss_mask.astype(int).tolist()


def test_text_is_trained_on_from_the_response_to_the_end_token(characters: Callable, load: Callable) -> None:
    data = load(characters(), [{"prompt": "2+2=", "response": "4"}, {"prompt": "9+1=", "response": "10"}])
    assert parts(data, 0) == ([4, 12, 4, 14], [6, EOS], [1, 1])
    assert parts(data, 1) == ([11, 12, 3, 14], [3, 2, EOS], [1, 1, 1])


def test_a_response_ends_once(characters: Callable, load: Callable) -> None:
    data = load(characters(), [{"prompt": "2+2=", "response": "4<eos>"}])
    assert parts(data) == ([4, 12, 4, 14], [6, EOS], [1, 1])


def test_other_columns_and_the_chat_template(characters: Callable, load: Callable) -> None:
    rows = [{"q": "2+2", "a": "4"}]
    data = load(characters(TEMPLATE), rows, prompt_column="q", response_column="a", chat=True, system_prompt="7 ")
    assert parts(data) == ([9, 15, 4, 12, 4, 14], [6, EOS], [1, 1])


def test_of_a_conversation_every_answer_is_trained_on(characters: Callable, load: Callable) -> None:
    data = load(characters(TEMPLATE), [{"messages": TWO_TURNS}], messages_column="messages")
    # 2+2= | 4<eos>, then the template's " 3+3=", then 06<eos>
    assert parts(data) == ([4, 12, 4, 14], [6, EOS, 15, 5, 12, 5, 14, 2, 8, EOS], [1, 1, 0, 0, 0, 0, 0, 1, 1, 1])


def test_of_a_conversation_only_the_last_answer(characters: Callable, load: Callable) -> None:
    expected = ([4, 12, 4, 14, 6, EOS, 15, 5, 12, 5, 14], [2, 8, EOS], [1, 1, 1])
    rows = [{"messages": TWO_TURNS}]
    assert parts(load(characters(TEMPLATE), rows, messages_column="messages", train_on="last")) == expected
    # A prompt may be a conversation; its answers are given, not trained on.
    assert parts(load(characters(TEMPLATE), [{"prompt": TWO_TURNS[:3], "response": "06"}])) == expected


def test_what_nobody_answers_is_left_out(characters: Callable, load: Callable) -> None:
    rows = [{"messages": [*TWO_TURNS, user("1+1")]}, {"messages": TWO_TURNS}]
    data = load(characters(TEMPLATE), rows, messages_column="messages")
    assert parts(data, 0) == parts(data, 1)


def test_a_prompt_is_tokenized_as_it_is_for_an_answer(make_model: Callable, load: Callable) -> None:
    """Holds even if a byte-level BPE has a token that would span the prompt's end, here " clips"."""
    tokenizer = Tokenizer.load(make_model(SPACED))
    messages = [user("How many?"), assistant("clips"), user("And then?"), assistant("half as many")]
    (example,) = load(tokenizer, [{"messages": messages}], messages_column="messages").examples
    assert example.prompt_tokens.tolist() == tokenizer.encode(tokenizer.render(messages[:1]))
    whole = [*example.prompt_tokens.tolist(), *example.tokens.tolist()]
    text = tokenizer.render(messages, add_generation_prompt=False).removesuffix("\n")
    assert tokenizer.decode(whole, skip_special_tokens=False) == text
    assert tokenizer.encode(text) != whole
    trained = tokenizer.decode(example.tokens[example.loss_mask].tolist(), skip_special_tokens=False)
    assert trained == "clips<|im_end|>half as many<|im_end|>"


def test_a_template_that_rewrites_earlier_turns(characters: Callable, load: Callable) -> None:
    tokenizer = characters(FORGETFUL)
    turns = [user("2+2"), assistant("44"), user("3+3"), assistant("6")]
    with pytest.raises(InvalidInput, match=r"rows.parquet row 2: .*not prefix-stable: message 1") as refused:
        load(tokenizer, [{"m": TWO_TURNS}, {"m": turns}], messages_column="m", bad_rows="drop")
    assert refused.value.metadata["field"] == "data.chat_template"
    data = load(tokenizer, [{"m": turns}], messages_column="m", train_on="last")
    assert parts(data) == ([4, 12, 4, 14, 6, EOS, 15, 5, 12, 5, 14], [8, EOS], [1, 1])


BAD_ROWS = {
    "null response": ({"prompt": "1", "response": None}, "the response is null"),
    "empty response": ({"prompt": "1", "response": " "}, "the response is empty"),
    "empty prompt": ({"prompt": "", "response": "1"}, "the prompt is empty"),
    "end token": ({"prompt": "1", "response": "1<eos>2"}, "answer 0 quotes an end token, which the vocabulary"),
    "null conversation": ({"m": None}, "the conversation is null"),
    "no messages": ({"m": []}, "the conversation is empty"),
    "no answer": ({"m": [user("1")]}, "it has no message of the assistant"),
    "no question": ({"m": TWO_TURNS[1:]}, "it begins with a message of the assistant"),
    "no content": ({"m": [user("1"), {"role": "assistant", "content": None}]}, "message 1 has no content"),
    "empty answer": ({"m": [user("1"), assistant(" ")]}, "the assistant's message 1 is empty"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(characters: Callable, load: Callable, caplog: Any, name: str) -> None:
    bad, reason = BAD_ROWS[name]
    good, settings = {"prompt": "2+2=", "response": "4"}, {}
    if "m" in bad:
        good, settings = {"m": TWO_TURNS}, {"messages_column": "m"}
    tokenizer = characters(TEMPLATE)
    with pytest.raises(InvalidInput, match=r"1 of 2 rows that are bad.*data.bad_rows=drop") as refused:
        load(tokenizer, [good, bad], **settings)
    assert f"row 2: {reason}" in refused.value.message
    with caplog.at_level(logging.WARNING):
        data = load(tokenizer, [bad, good], bad_rows="drop", **settings)
    assert len(data) == 1 and data.examples[0].prompt_id.startswith("1-")
    assert reason in caplog.text


def test_what_the_template_refuses_is_a_bad_row(characters: Callable, load: Callable) -> None:
    tokenizer = characters("{{ raise_exception('no tools') if messages[0].role == 'tool' }}" + TEMPLATE)
    rows = [{"m": TWO_TURNS}, {"m": [{"role": "tool", "content": "1"}, *TWO_TURNS]}]
    with pytest.raises(InvalidInput, match=r"1 of 2 rows that are bad: .*row 2: the chat template rejects .*no tools"):
        load(tokenizer, rows, messages_column="m")
    assert len(load(tokenizer, rows, messages_column="m", bad_rows="drop")) == 1


def test_a_template_without_an_end_token(characters: Callable, load: Callable) -> None:
    tokenizer = characters(TEMPLATE.replace("<eos>", ""))
    with pytest.raises(InvalidInput, match="answer 0 is not followed by an end token of the model"):
        load(tokenizer, [{"m": TWO_TURNS}], messages_column="m")


def test_overlong_rows(characters: Callable, load: Callable, caplog: Any) -> None:
    rows = [{"prompt": "1" * 5, "response": "2"}, {"prompt": "1" * 6, "response": "2"}]
    with pytest.raises(InvalidInput, match=r"1 of 2 rows that are above data.max_tokens 7: .*row 2: 8 tokens"):
        load(characters(), rows, max_tokens=7)
    with caplog.at_level(logging.WARNING):
        assert len(load(characters(), rows, max_tokens=7, overlong="drop")) == 1
    assert "row 2: 8 tokens" in caplog.text
    with pytest.raises(InvalidInput, match="no rows left of 2"):
        load(characters(), rows, max_tokens=2, overlong="drop")


def test_several_end_tokens(tmp_path: Path, characters: Callable, load: Callable) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    rows = [{"prompt": "2+2=", "response": "4"}]
    with raises(InvalidInput, field="data.end_token"):
        load(characters(), rows)
    with raises(InvalidInput, field="data.end_token"):
        load(characters(), rows, end_token="4")
    assert parts(load(characters(), rows, end_token="<pad>"))[1] == [6, 0]
    # A template writes its end token itself.
    assert parts(load(characters(TEMPLATE), [{"m": TWO_TURNS[:2]}], messages_column="m"))[1] == [6, EOS]


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"prompt_column": "promt"}, "data.prompt_column", "did you mean prompt"),
        ({"response_column": "n"}, "data.response_column", "int64, not text"),
        ({"messages_column": "prompt"}, "data.messages_column", "string, not a list"),
        ({"chat": True}, "data.chat_template", "no chat template"),
        ({"system_prompt": "s"}, "data.system_prompt", "set data.chat"),
        ({"chat_template": "t.jinja"}, "data.chat_template", "set data.chat"),
        ({"samples_per_step": 2}, "data.samples_per_step", "has 1 rows"),
    ],
)
def test_what_cannot_be_read(characters: Callable, load: Callable, settings: dict, field: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        load(characters(), [{"prompt": "2+2=", "response": "4", "n": 1}], **settings)
    assert refused.value.metadata["field"] == field


def test_conversations_that_no_key_names_are_found(characters: Callable, load: Callable) -> None:
    with pytest.raises(InvalidInput, match=r"conversations in m: set data\.messages_column=m"):
        load(characters(TEMPLATE), [{"m": TWO_TURNS}])


def test_batches_follow_from_data_seed_and_step(tmp_path: Path, characters: Callable, load: Callable) -> None:
    rows = [{"prompt": f"{i}=", "response": str(i)} for i in range(10)]
    tokenizer = characters()
    data = load(tokenizer, rows, samples_per_step=4, shuffle=True)
    again = load(tokenizer, rows, samples_per_step=4, shuffle=True)
    assert data.digest == again.digest
    batches = [data.batch(step) for step in range(6)]
    assert again.batch(5).equals(batches[5])  # asked for first
    order = EpochOrder(10, 4, seed=0, shuffle=True)
    for step, batch in enumerate(batches):
        batch.validate(full=True)
        assert batch.schema.equals(SAMPLE_SCHEMA)
        prompts = [f"{index}=" for index in order.indices(step)]
        assert [tokenizer.decode(tokens) for tokens in batch["prompt_tokens"].to_pylist()] == prompts
        assert set(batch["policy_version"].to_pylist()) == {step}
        assert set(batch["policy_digest"].to_pylist()) == {""}
        assert batch["group"].to_pylist() == [0, 1, 2, 3]
        for tokens, mask, logprobs in zip(
            *(batch[n].to_pylist() for n in ("tokens", "loss_mask", "logprobs")), strict=True
        ):
            assert mask == [True] * len(tokens) and logprobs == [0.0] * len(tokens)
    assert [data.num_steps(epochs) for epochs in (1, 2, 4)] == [3, 5, 10]
    assert load(tokenizer, rows[::-1], samples_per_step=4).digest != data.digest
    held_out = SftFile.held_out(
        SftDataConfig(
            train=tmp_path / "none", eval={"a": tmp_path / "rows.parquet"}, max_eval_rows=3, samples_per_step=1
        ),
        tokenizer,
    )
    assert [len(rows) for rows in held_out.values()] == [3]
    np.testing.assert_array_equal(held_out["a"][0].tokens, [11, EOS])
    with raises(NotFound, field="data.train"):
        SftDataset.load(SftDataConfig(train=tmp_path / "none", samples_per_step=1), tokenizer, seed=0)


def test_digest_sees_the_mask(characters: Callable, load: Callable) -> None:
    rows = [{"m": TWO_TURNS}]
    tokenizer = characters(TEMPLATE)
    digests = {load(tokenizer, rows, messages_column="m", train_on=turns).digest for turns in ("all", "last")}
    assert len(digests) == 2


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
# ChatML that shows tools and calls.
WITH_CALLS = """
{%- if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{{ '\\n' }}{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }} {{ m.content }}
{%- for call in (m.tool_calls if 'tool_calls' in m else []) %}[{{ call.function.arguments.a }}]{% endfor -%}
<|im_end|>{{ '\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant ' if add_generation_prompt }}"""
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}


@pytest.fixture
def texts(make_model: Callable, tmp_path: Path) -> Callable[..., list[tuple[str, bool]]]:
    """Returns the whole text of a conversation in JSON Lines, divided into what is trained on and what is not."""

    def load(*rows: dict[str, Any], template: str = WITH_CALLS, **config: Any) -> list[tuple[str, bool]]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = Tokenizer.load(make_model(template))
        settings = {"train": path, "samples_per_step": 1, "shuffle": False, "messages_column": "messages", **config}
        example = SftDataset.load(SftDataConfig(**settings), tokenizer, seed=0).examples[0]
        tokens = [*example.prompt_tokens.tolist(), *example.tokens.tolist()]
        masks = [False] * len(example.prompt_tokens) + example.loss_mask.tolist()
        return [
            (tokenizer.decode([token for token, _ in part], skip_special_tokens=False), is_trained)
            for is_trained, part in groupby(zip(tokens, masks, strict=True), key=lambda pair: pair[1])
        ]

    return load


def test_a_conversation_as_openai_writes_it(texts: Callable) -> None:
    parts = [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 3?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": [{"type": "text", "text": "It is 5."}], "refusal": None, "tool_calls": None},
    ]
    called = [
        ("<|im_start|>system Be brief.<|im_end|>\n<|im_start|>user 2 + 3?<|im_end|>\n<|im_start|>assistant ", False)
    ]
    called += [("[2]<|im_end|>", True), ("\n<|im_start|>tool 5<|im_end|>\n<|im_start|>assistant ", False)]
    assert texts({"messages": messages}) == [*called, ("It is 5.<|im_end|>", True)]
    for tools in ([SCHEMA], json.dumps([SCHEMA])):
        shown = ("<|im_start|>tools " + json.dumps([SCHEMA]) + "<|im_end|>\n" + called[0][0], False)
        assert texts({"messages": messages, "tools": tools}) == [shown, *called[1:], ("It is 5.<|im_end|>", True)]
        assert texts({"messages": messages, "schemas": tools}, tools_column="schemas")[0] == shown
        assert texts({"messages": messages, "tools": tools}, tools_column=None)[0] == called[0]
    assert texts({"messages": messages, "tools": []}, {"messages": messages, "tools": [SCHEMA]})[0] == called[0]


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0, "train": True}])
def test_messages_that_are_not_trained_on(texts: Callable, flag: dict[str, Any]) -> None:
    first, last = {**assistant("4"), **flag}, {**assistant("6"), "train": True, "weight": 1}
    head = "<|im_start|>user a<|im_end|>\n<|im_start|>assistant "
    between = "<|im_end|>\n<|im_start|>user b<|im_end|>\n<|im_start|>assistant "
    whole = [(head + "4" + between, False), ("6<|im_end|>", True)]
    rows = {"messages": [user("a"), first, {**user("b"), "train": False}, last]}
    assert texts(rows) == texts(rows, train_on="last") == whole
    last, first = {**assistant("6"), **flag}, assistant("4")
    rows = {"messages": [user("a"), first, user("b"), last]}
    assert texts(rows) == [(head, False), ("4<|im_end|>", True)]
    for unusable in ({"messages": [user("a"), last]}, {"messages": [user("a"), {**assistant("b"), "weight": 0.5}]}):
        with pytest.raises(InvalidInput, match=r"to be trained on|message 1 has train or weight \[0.5\]"):
            texts(unusable)
    with pytest.raises(InvalidInput, match="to be trained on"):
        texts(rows, train_on="last")


@pytest.mark.parametrize("quote", ["<|im_end|>", "<|endoftext|>", "<|im_end|> and <|endoftext|>"])
def test_an_answer_that_quotes_an_end_token_is_trained_on_as_text(
    texts: Callable, make_model: Callable, quote: str
) -> None:
    said = f"A turn ends with {quote} here."
    rows = {"messages": [user("a"), assistant(said), user("b"), assistant("c")]}
    trained = [text for text, is_trained in texts(rows) if is_trained]
    assert trained == [said + "<|im_end|>", "c<|im_end|>"]
    prompted = texts(
        {"p": "a ", "r": said}, messages_column=None, prompt_column="p", response_column="r", end_token="<|im_end|>"
    )
    assert prompted == [("<|endoftext|>a ", False), (said + "<|im_end|>", True)]
    with pytest.raises(InvalidInput, match="answer 0 has 2 end tokens"):
        texts({"messages": [user("a"), assistant("4<|im_end|>")]})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [user("a"), {"role": "assistant", "content": None}]}, "message 1 has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, assistant("b")]},
            "part 0 of message 0 is image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}, assistant("b")]},
            "part 0 of message 0 is without",
        ),
        (
            {"messages": [user("a"), {**assistant(""), "tool_calls": [{"function": {"arguments": "[1]"}}]}]},
            "arguments of tool call 0 of message 1 are neither an object nor",
        ),
        ({"messages": [user("a"), assistant("b")], "tools": "x"}, "the tools are not JSON"),
        (
            {"messages": [user("a"), assistant("b")], "tools": ["x"]},
            "not a list of JSON schemas: data.tools_column=null",
        ),
    ],
)
def test_what_is_no_conversation_of_text(texts: Callable, row: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        texts(row)
    with pytest.raises(InvalidInput, match="has no column schemas"):
        texts({"messages": TWO_TURNS}, tools_column="schemas")


def test_tools_of_text_prompts_are_not_ignored_in_silence(texts: Callable, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "a", "response": "b", "tools": [SCHEMA]}
    keys = {"messages_column": None, "end_token": "<|im_end|>"}
    with pytest.raises(InvalidInput, match=r"only a chat template shows tools, but .* has text prompts: set data"):
        texts(row, tools_column="tools", **keys)
    assert texts(row, **keys) == texts({**row, "tools": None}, tools_column=None, **keys)
    assert "its column tools is ignored" in caplog.text and "tools" in texts(row, chat=True, **keys)[0][0]
