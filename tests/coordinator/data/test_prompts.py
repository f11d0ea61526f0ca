"""Tests the loading of prompt files: valid rows are kept unchanged, errors name the file and the row."""

import json
import logging
import tracemalloc

import pyarrow as pa
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from services.common.config.data import DataConfig
from services.common.errors import InvalidInput, NotFound
from services.coordinator.data.prompts import Prompt, PromptDataset, load_eval
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.conftest import CHATML
from tests.support import raises

CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
MESSAGES = [[{"role": "user", "content": f"What is {n} + {n}?"}] for n in range(4)]


def config(path, **keys) -> DataConfig:
    return DataConfig.model_validate({"train": path, "prompts_per_step": 1} | keys)


@pytest.fixture
def load(tokenizer):
    return lambda path, **keys: PromptDataset.load(config(path, **keys), tokenizer, seed=0)


def columns(num_rows: int) -> dict[str, list]:
    return {"prompt": [f"{n} + {n} =" for n in range(num_rows)], "answer": [str(2 * n) for n in range(num_rows)]}


class TestPrompts:
    def test_text(self, load, tokenizer, write_parquet):
        path = write_parquet(**columns(3), level=[1, None, 3], tags=[["a"], [], ["b", "c"]], meta=[{"k": 0.5}] * 3)
        dataset = load(path)
        assert len(dataset) == 3
        prompt = dataset.prompts[1]
        assert prompt == Prompt(
            prompt_id=prompt.prompt_id,
            text="1 + 1 =",
            tokens=tuple(tokenizer.encode("1 + 1 =", add_special_tokens=True)),
            answer="2",
            extra={"level": None, "tags": [], "meta": {"k": 0.5}},
            messages=({"role": "", "content": "1 + 1 ="},),
            row_prompt="1 + 1 =",
        )
        assert all(type(token) is int for token in prompt.tokens)
        assert json.loads(json.dumps(prompt.extra)) == prompt.extra
        assert prompt.tokens[0] == 0
        assert load(path, add_special_tokens=False).prompts[1].tokens == prompt.tokens[1:]

    def test_a_text_that_was_rendered_already_gets_no_second_bos(self, load, write_parquet):
        path = write_parquet(prompt=["<|endoftext|>1 + 1 =", "1 + 1 ="], answer=["2", "2"])
        written, plain = load(path).prompts
        assert written.tokens == plain.tokens and written.tokens.count(0) == 1
        assert load(path, add_special_tokens=False).prompts[0].tokens == plain.tokens

    def test_messages(self, load, tokenizer, write_parquet):
        path = write_parquet(prompt=pa.array(MESSAGES, CHAT), answer=list("0246"))
        prompt = load(path).prompts[2]
        assert prompt.text == tokenizer.render(MESSAGES[2])
        assert prompt.messages == tuple(MESSAGES[2])
        assert list(prompt.tokens) == tokenizer.encode(prompt.text)

    @pytest.mark.parametrize("begun", ["end", " So\n", "<think>\nHm, ", "You are helpful.", "What is 1 + 1?", "<"])
    def test_a_message_to_continue(self, load, make_model, write_parquet, begun):
        chat = [*MESSAGES[1], {"role": "assistant", "content": begun}]
        path = write_parquet(prompt=pa.array([chat], CHAT), answer=["4"])
        prompt = load(path, continue_final_message=True).prompts[0]
        theirs = AutoTokenizer.from_pretrained(make_model())
        assert prompt.text == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert prompt.text.endswith("<|im_start|>assistant\n" + begun)
        assert list(prompt.tokens) == theirs(prompt.text, add_special_tokens=False)["input_ids"]
        assert list(prompt.row_prompt) == chat
        with pytest.raises(InvalidInput, match=r"remove it, or, if .* set data\.continue_final_message"):
            load(path)
        trims = Tokenizer.load(make_model(CHATML.replace("+ message['content'] +", "+ message['content'] | trim +")))
        text = PromptDataset.load(config(path, continue_final_message=True), trims, seed=0).prompts[0].text
        assert text.endswith("<|im_start|>assistant\n" + begun.strip())

    def test_text_as_chat(self, load, write_parquet):
        as_text = write_parquet("text.parquet", prompt=[chat[0]["content"] for chat in MESSAGES], answer=list("0246"))
        as_chat = write_parquet("chat.parquet", prompt=pa.array(MESSAGES, CHAT), answer=list("0246"))
        text, chat = load(as_text, chat=True).prompts[1], load(as_chat).prompts[1]
        assert (text.tokens, text.text, text.messages) == (chat.tokens, chat.text, tuple(MESSAGES[1]))

    @pytest.mark.parametrize("settings", [{}, {"system_prompt": "Be brief."}])
    def test_the_rows_own_prompt_is_kept(self, load, write_parquet, settings):
        own = [chat[0]["content"] for chat in MESSAGES]
        as_text = write_parquet("text.parquet", prompt=own, answer=list("0246"))
        as_chat = write_parquet("chat.parquet", prompt=pa.array(MESSAGES, CHAT), answer=list("0246"))
        text, chat = load(as_text, chat=True, extra_columns=["prompt"], **settings), load(as_chat, **settings)
        assert [prompt.row_prompt for prompt in text.prompts] == own
        assert [prompt.extra for prompt in text.prompts] == [{"prompt": prompt} for prompt in own]
        assert [list(prompt.row_prompt) for prompt in chat.prompts] == MESSAGES

    def test_template_settings(self, load, tokenizer, write_parquet):
        path = write_parquet(prompt=pa.array(MESSAGES, CHAT), answer=list("0246"))
        dataset = load(path, system_prompt="Be brief.", chat_template_kwargs={"enable_thinking": False})
        chat = [{"role": "system", "content": "Be brief."}, *MESSAGES[0]]
        assert dataset.prompts[0].text == tokenizer.render(chat, enable_thinking=False)
        assert dataset.prompts[0].text.endswith("</think>\n\n")
        assert dataset.prompts[0].messages == tuple(chat)

    def test_nulls_of_a_struct_are_not_keys(self, make_model, load, write_parquet):
        kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
        path = write_parquet(prompt=pa.array([[{"role": "user", "content": "x", "name": None}]], kind), answer=["y"])
        tokenizer = Tokenizer.load(make_model("{{ messages | tojson }}"))
        prompt = PromptDataset.load(config(path), tokenizer, seed=0).prompts[0]
        assert json.loads(prompt.text) == list(prompt.messages) == [{"role": "user", "content": "x"}]

    def test_messages_cost_no_memory(self, load, write_parquet):
        content = "What is 2 + 2? " * 2000
        chat = pa.array([[{"role": "user", "content": content}]] * 30, CHAT)
        path = write_parquet(prompt=chat, answer=["4"] * 30)
        load(path, max_prompt_tokens=10**6)  # what is loaded once
        tracemalloc.start()
        dataset = load(path, max_prompt_tokens=10**6)
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        num_tokens = sum(len(prompt.tokens) for prompt in dataset.prompts)
        assert used - 4 * num_tokens < 1.1 * 30 * len(content)  # the text once

    def test_other_column_names_and_encodings(self, load, write_parquet):
        prompt = pa.array(["a b", "a b"]).dictionary_encode()
        path = write_parquet(
            question=prompt, gold=pa.array(["1", "2"], pa.large_string()), level=[1, 2], note=["x", "y"]
        )
        dataset = load(path, prompt_column="question", answer_column="gold", extra_columns=["note"])
        assert [(p.text, p.answer, p.extra) for p in dataset.prompts] == [
            ("a b", "1", {"note": "x"}),
            ("a b", "2", {"note": "y"}),
        ]

    def test_several_files_are_one(self, load, write_parquet):
        parts = [write_parquet(f"{name}.parquet", **columns(2)) for name in "ab"]
        dataset = load([str(part) for part in parts], prompts_per_step=4, shuffle=False)
        assert [prompt.text for prompt in dataset.batch(0)] == ["0 + 0 =", "1 + 1 ="] * 2
        assert [prompt.prompt_id.split("-")[0] for prompt in dataset.batch(0)] == list("0123")

    def test_more_rows_than_one_chunk(self, load, write_parquet, tokenizer):
        dataset = load(write_parquet(**columns(9000)), add_special_tokens=False)
        assert [tokenizer.decode(dataset.prompts[n].tokens) for n in range(4094, 4098)] == [
            f"{n} + {n} =" for n in range(4094, 4098)
        ]
        assert dataset.prompts[-1].text == "8999 + 8999 ="
        with pytest.raises(IndexError):
            dataset.prompts[9000]

    def test_eval(self, tokenizer, write_parquet):
        keys = {
            "eval": {"short": str(write_parquet("a.parquet", **columns(2))), "long": str(write_parquet(**columns(5)))}
        }
        sets = load_eval(config("unused.parquet", max_eval_prompts=3, **keys), tokenizer)
        assert {name: [prompt.answer for prompt in prompts] for name, prompts in sets.items()} == {
            "short": ["0", "2"],
            "long": ["0", "2", "4"],
        }
        with raises(NotFound, field="data.eval.x"):
            load_eval(config("unused.parquet", eval={"x": "none.parquet"}), tokenizer)

    def test_answers_that_no_scorer_reads(self, tokenizer, write_parquet):
        def answers(**columns):
            path = write_parquet(prompt=["a", "b"], **columns)
            data = PromptDataset.load(config(path), tokenizer, seed=0, needs_answer=False)
            held_out = load_eval(config("x", eval={"x": str(path)}), tokenizer, needs_answer=False)
            assert held_out["x"][1] == data.prompts[1]
            return [(prompt.answer, prompt.answer_is_integer, prompt.extra) for prompt in data.prompts]

        assert answers() == [(None, False, {}), (None, False, {})]
        assert answers(answer=["1", ""]) == [("1", False, {}), ("", False, {})]
        assert answers(answer=["1", None]) == [("1", False, {}), (None, False, {})]
        assert answers(answer=[1, 2]) == [("1", True, {}), ("2", True, {})]


class TestBatches:
    def test_all_follows_from_dataset_seed_and_step(self, tokenizer, write_parquet):
        path = write_parquet(**columns(10))
        first = PromptDataset.load(config(path, prompts_per_step=4), tokenizer, seed=3)
        steps = [first.batch(step) for step in range(5)]
        again = PromptDataset.load(config(path, prompts_per_step=4), tokenizer, seed=3)
        assert again.digest == first.digest
        assert again.batch(4) == steps[4]
        ids = [prompt.prompt_id for batch in steps for prompt in batch]
        assert sorted(ids[:10]) == sorted(ids[10:]) and len(set(ids)) == 10
        assert ids[:10] != ids[10:]
        other = PromptDataset.load(config(path, prompts_per_step=4), tokenizer, seed=4)
        assert other.digest == first.digest
        assert [other.batch(step) for step in range(5)] != steps

    def test_digest_tells_any_change(self, make_model, load, write_parquet):
        base = columns(3)
        changes = {
            "prompt": base | {"prompt": ["0 + 0 =", "1 + 1 = ", "2 + 2 ="]},
            "answer": base | {"answer": ["0", "2", "5"]},
            "extra": base | {"level": [1, 2, 3]},
            "order": {name: values[::-1] for name, values in base.items()},
            "fewer": columns(2),
            "boundary": base | {"prompt": ["0 + 0 =1", " + 1 =", "2 + 2 ="]},
        }
        digests = {name: load(write_parquet(**change)).digest for name, change in changes.items()}
        digests["none"] = load(write_parquet(**base)).digest
        digests["special tokens"] = load(write_parquet(**base), add_special_tokens=False).digest
        digests["template"] = load(write_parquet(**base), chat=True).digest
        other = Tokenizer.load(make_model("Q: {{ messages[0].content }}"))
        digests["other template"] = PromptDataset.load(config(write_parquet(**base), chat=True), other, seed=0).digest
        assert len(set(digests.values())) == len(digests)
        assert all(len(digest) == 32 for digest in digests.values())

    def test_prompt_ids_outlive_template_and_dropped_rows(self, load, write_parquet):
        path = write_parquet(prompt=["", *columns(3)["prompt"]], answer=["x", "0", "2", "4"])
        plain, chat = (load(path, bad_rows="drop", chat=chat) for chat in (False, True))
        assert [p.prompt_id for p in plain.prompts] == [p.prompt_id for p in chat.prompts]
        assert [p.prompt_id.split("-")[0] for p in plain.prompts] == list("123")


class TestBadInput:
    def test_bad_rows_are_named_and_counted(self, load, write_parquet):
        prompts = ["ok", None, "", " \n", "ok", "ok", "ok", "ok", "ok"]
        answers = ["1", "1", "1", "1", None, "", " ", "1", None]
        path = write_parquet(prompt=prompts, answer=answers)
        with pytest.raises(InvalidInput) as caught:
            load(path)
        assert caught.value.message == (
            f"data.train has 7 of 9 rows that are bad: {path} row 2: the prompt is null; {path} row 3: the prompt is "
            f"empty; {path} row 4: the prompt is empty; {path} row 5: the answer is null; {path} row 6: the answer is "
            "empty; and 2 more (counted from 1). Fix them, or set data.bad_rows=drop"
        )
        assert caught.value.metadata == {"field": "data.train", "bad_rows": "7"}

    def test_bad_rows_are_dropped_aloud(self, load, write_parquet, caplog):
        path = write_parquet(prompt=["a", None, "c"], answer=["1", "2", "3"])
        with caplog.at_level(logging.WARNING):
            dataset = load(path, bad_rows="drop")
        assert [prompt.text for prompt in dataset.prompts] == ["a", "c"]
        (message,) = caplog.messages
        assert message.startswith("data.train: dropped 1 of 3 rows that are bad: ")
        assert message.endswith(f" {path} row 2: the prompt is null (counted from 1)")

    @pytest.mark.parametrize(
        ("chat", "message"),
        [
            (None, "the prompt is null"),
            ([], "the prompt is empty"),
            ([None], "message 0 of the prompt has no content"),
            ([{"role": "user", "content": "x"}, {"role": None, "content": "x"}], "message 1 of the prompt has no role"),
            ([{"role": "user", "content": " "}], "the last message of the prompt is empty"),
            ([{"role": "assistant", "content": "x"}], "ends with an assistant message"),
            ([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], "it has a system message"),
        ],
    )
    def test_bad_messages(self, load, write_parquet, chat, message):
        path = write_parquet(prompt=pa.array([*MESSAGES, chat], CHAT), answer=list("02461"))
        with pytest.raises(InvalidInput, match=f"1 of 5 rows that are bad: .*row 5: .*{message}"):
            load(path, system_prompt="Be brief.")

    def test_what_the_template_refuses_is_a_bad_row(self, make_model, write_parquet):
        template = "{% if messages[0].role != 'user' %}{{ raise_exception('start with user') }}{% endif %}"
        tokenizer = Tokenizer.load(make_model(template + "{{ messages[0].content }}"))
        chats = [*MESSAGES, [{"role": "tool", "content": "x"}]]
        path = write_parquet(prompt=pa.array(chats, CHAT), answer=list("02461"))
        with pytest.raises(InvalidInput, match="row 5: the chat template rejects these messages: start with user"):
            PromptDataset.load(config(path), tokenizer, seed=0)

    def test_nan_is_not_json(self, load, write_parquet):
        with pytest.raises(InvalidInput, match="row 2: column level holds NaN or infinity, which is not JSON"):
            load(write_parquet(**columns(2), level=[0.5, float("nan")]))

    def test_overlong(self, load, write_parquet, tokenizer, caplog):
        long = "How many clips did she sell altogether? " * 3
        length = len(tokenizer.encode(long, add_special_tokens=True))
        path = write_parquet(prompt=["a", long, "b"], answer=["1", "2", "3"])
        assert len(load(path, max_prompt_tokens=length)) == 3
        with pytest.raises(InvalidInput) as caught:
            load(path, max_prompt_tokens=length - 1)
        assert caught.value.message == (
            f"data.train has 1 of 3 rows that are above data.max_prompt_tokens {length - 1}: {path} row 2: "
            f"{length} tokens (counted from 1). Increase it, or set data.overlong=drop"
        )
        assert caught.value.metadata["field"] == "data.max_prompt_tokens"
        with caplog.at_level(logging.WARNING):
            dataset = load(path, max_prompt_tokens=length - 1, overlong="drop")
        assert [prompt.text for prompt in dataset.prompts] == ["a", "b"]
        assert f"dropped 1 of 3 rows that are above data.max_prompt_tokens {length - 1}: {path} row 2" in caplog.text

    def test_dropping_one_kind_does_not_excuse_the_other(self, load, write_parquet):
        path = write_parquet(prompt=["a", None, "How many clips did she sell?"], answer=["1", "2", "3"])
        with raises(InvalidInput, field="data.train"):
            load(path, max_prompt_tokens=3, overlong="drop")
        with raises(InvalidInput, field="data.max_prompt_tokens"):
            load(path, max_prompt_tokens=3, bad_rows="drop")

    @pytest.mark.parametrize(
        ("columns", "keys", "message"),
        [
            ({"promt": ["a"], "answer": ["b"]}, {}, "has no column prompt, only promt, answer; did you mean promt"),
            ({"prompt": ["a"], "gold": ["b"]}, {}, r"^data\.answer_column: .*only prompt, gold; if .* any column of"),
            ({"prompt": ["a"], "answer": ["b"]}, {"extra_columns": ["x"]}, r"data\.extra_columns: .*no column x"),
            ({"prompt": [1], "answer": ["b"]}, {}, r"prompt of .* is int64, not text or a list of \{role, content\}"),
            ({"prompt": [["a"]], "answer": ["b"]}, {}, r"prompt of .* not text or a list"),
            ({"prompt": [[{"role": "user"}]], "answer": ["b"]}, {}, r"prompt of .* not text or a list"),
            ({"prompt": ["a"], "answer": [4.5]}, {}, r"answer of .* is double, not text or integers: convert it"),
            ({"prompt": ["a"], "answer": [{"x": 1}]}, {}, r"^data\.answer_column: .* name another .* from extra"),
            (
                {"prompt": ["a"], "answer": ["b"], "image": [b"x"]},
                {},
                r"^data\.extra_columns: column image of .* is binary, which JSON cannot represent: list the columns",
            ),
            (
                {"prompt": ["a"], "answer": ["b"]},
                {"prompts_per_step": 2},
                "prompts_per_step is 2, but .* has 1 prompts",
            ),
            ({"prompt": ["a"], "answer": ["b"]}, {"system_prompt": "x"}, r"system_prompt is set, but .* text prompts"),
            (
                {"prompt": ["a"], "answer": ["b"]},
                {"chat_template_kwargs": {"x": 1}},
                r"chat_template_kwargs is set, but .* text prompts",
            ),
            (
                {"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())},
                {},
                "no prompts left of 0 rows",
            ),
            (
                {"prompt": ["", ""], "answer": ["b", "b"]},
                {"bad_rows": "drop"},
                "no prompts left of 2 rows in .*parquet",
            ),
        ],
    )
    def test_unusable(self, load, write_parquet, columns, keys, message):
        with pytest.raises(InvalidInput, match=message):
            load(write_parquet(**columns), **keys)

    def test_unusable_files(self, load, tmp_path, write_parquet):
        with raises(NotFound, field="data.train"):
            load(tmp_path / "none.parquet")
        (tmp_path / "text.parquet").write_text('{"prompt": "a"}')
        with pytest.raises(InvalidInput, match=r"text\.parquet is not a readable Parquet file"):
            load(tmp_path / "text.parquet")
        whole = write_parquet(**columns(3)).read_bytes()
        (tmp_path / "half.parquet").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InvalidInput, match=r"half\.parquet is not a readable Parquet file"):
            load(tmp_path / "half.parquet")
        with pytest.raises(
            InvalidInput, match=r"is a directory; it holds half\.parquet, text\.parquet, train\.parquet"
        ):
            load(tmp_path)

    def test_messages_without_a_template(self, make_model, write_parquet):
        tokenizer = Tokenizer.load(make_model(None))
        path = write_parquet(prompt=pa.array(MESSAGES, CHAT), answer=list("0246"))
        with raises(InvalidInput, field="data.chat_template"):
            PromptDataset.load(config(path, bad_rows="drop"), tokenizer, seed=0)
        with raises(InvalidInput, field="data.chat_template"):
            PromptDataset.load(config(write_parquet(**columns(1)), chat=True), tokenizer, seed=0)

    def test_a_missing_date_is_no_bad_row(self, make_model, write_parquet):
        tokenizer = Tokenizer.load(make_model("{{ strftime_now('%Y') }}"))
        path = write_parquet(prompt=pa.array(MESSAGES, CHAT), answer=list("0246"))
        with raises(InvalidInput, field="data.template_date"):
            PromptDataset.load(config(path, bad_rows="drop"), tokenizer, seed=0)


class TestConfig:
    def test_paths_in_short(self):
        short = config("data/gsm8k/train.parquet", eval=["data/gsm8k/test.parquet", "aime.parquet"])
        assert [str(path) for path in short.train] == ["data/gsm8k/train.parquet"]
        assert {name: str(path) for name, path in short.eval.items()} == {
            "gsm8k-test": "data/gsm8k/test.parquet",
            "aime": "aime.parquet",
        }
        assert config("a", eval="b/c.parquet").eval.keys() == {"b-c"}
        assert config("a", eval=["../c.parquet", ".b/c d.parquet"]).eval.keys() == {"c", "b-c_d"}
        assert DataConfig.model_validate_json(short.model_dump_json()) == short

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"train": []}, "at least 1 item"),
            ({"eval": ["x/a.parquet", "y/x/a.parquet"]}, "two files would get the same name"),
            *(
                ({"eval": {name: "x.parquet"}}, "is not a valid name")
                for name in ("a/b", "../../outside", "", ".a", "a b", "a\n")
            ),
            ({"eval": "数/据.parquet"}, r"as in \{held-out: 数/据.parquet\}"),
            ({"eval": 3}, "valid dictionary"),
            ({"prompts_per_step": 0}, "greater than or equal to 1"),
            ({"overlong": "truncate"}, "'fail' or 'drop'"),
            ({"bad_row": "drop"}, "Extra inputs"),
        ],
    )
    def test_refusals(self, keys, message):
        with pytest.raises(ValidationError, match=message):
            config("a.parquet", **keys)
