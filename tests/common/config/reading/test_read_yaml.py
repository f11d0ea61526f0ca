"""Tests that hostile YAML ends in a message, quickly, and that ordinary anchors and merges work."""

import json

import pytest
import yaml

from services.common.config.load import load
from services.common.config.read_yaml import parse_yaml
from services.common.config.run import Config
from services.common.errors import InvalidInput
from tests.common.config.smallest import refused

_LEVELS = 12
BOMBS = {
    "aliases": "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 10}]\n" for n in range(_LEVELS)),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n + 1}: &a{n + 1} {{<<: [{f'*a{n}, ' * 10}]}}\n" for n in range(_LEVELS)),
    "deep lists": "a: " + "[" * 1000 + "]" * 1000,
    "deep tables": "\n".join(" " * depth + "a:" for depth in range(500)),
    "itself": "a: &a [*a]",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.timeout(60)  # written out, the bombs have 10^12 values
def test_a_bomb_is_refused_by_file_and_by_override(text: str, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=r"run\.yaml is not YAML: "):
        load(Config, [str(tmp_path / "run.yaml")])
    flow = text if text.startswith("a: ") else f"{{{','.join(text.splitlines())}}}"
    with pytest.raises(InvalidInput, match=r"is not a YAML value: |unknown key|must be a table of keys"):
        load(Config, [f"data={flow.removeprefix('a: ')}"])


def test_a_key_with_too_many_parts_is_refused():
    with pytest.raises(InvalidInput, match="no key has 5000 parts"):
        load(Config, [".".join(["a"] * 5000) + "=1"])


def test_anchors_and_merges_of_a_usual_size_work():
    text = "base: &base {lr: 1, betas: &betas [0.9, 0.99]}\ntrainer: {<<: *base, eps: 2}\nother: *betas"
    assert parse_yaml(text)["trainer"] == {"lr": 1, "betas": [0.9, 0.99], "eps": 2}
    assert parse_yaml(text)["other"] == [0.9, 0.99]


def test_a_key_that_is_set_twice_is_refused():
    with pytest.raises(yaml.YAMLError, match="lr is set twice"):
        parse_yaml("lr: 1\nlr: 2")


@pytest.mark.parametrize(
    "text",
    [
        "Put it after #### and stop",
        "Answer: yes or no",
        "*.jsonl",
        "- a",
        "@a",
        "one\n two",
        "5 # five",
        "<<",
        "---",
        "é😀",
    ],
)
def test_a_text_on_the_command_line_is_kept_as_it_is(file: str, text: str) -> None:
    for value in (text, f" {text}\n", json.dumps(text)):
        assert load(Config, [file, f"data.system_prompt={value}"]).data.system_prompt == text


def test_an_override_is_a_number_only_as_a_whole(file: str) -> None:
    assert "num_steps: must be an integer, not '5 # five'" in refused(file, "num_steps=5 # five")
    config = load(Config, [file, "num_steps=010", "name=010", "data.template_date=2026-02-28"])
    assert (config.num_steps, config.name, str(config.data.template_date)) == (10, "010", "2026-02-28")  # not octal 8
    assert parse_yaml("[010, 1:30, 1:30.5, -07, 0, 0.5, 0x1F, 12]") == ["010", "1:30", "1:30.5", "-07", 0, 0.5, 31, 12]
    assert "data.template_date: must be a valid date" in refused(file, "data.template_date=2026-02-31")
    assert load(Config, [file, "data.max_eval_prompts=5", "data.max_eval_prompts="]).data.max_eval_prompts is None


def test_a_date_that_does_not_exist_is_an_error_of_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {template_date: 2026-02-31}")
    with pytest.raises(InvalidInput, match="is not YAML: day is out of range"):
        load(Config, [str(tmp_path / "run.yaml")])


def test_half_of_a_character_is_refused(file: str) -> None:
    with pytest.raises(InvalidInput, match=r"'a\\ud83d' has half of a character: write the character itself"):
        load(Config, [file, r'data.system_prompt="a\ud83d"'])


def test_a_name_that_is_no_text_is_told_with_its_table(file: str) -> None:
    told = (
        "data.eval: a name must be text, and True is a truth value, as YAML reads yes, on and true: put it into quotes"
    )
    assert told in refused(file, "data.eval={on: a.parquet}")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.loss.kl_kind=low_var_kl", "k3"),
        ("trainer.loss.kind=geo_mean", "gmpo"),
        ("trainer.loss.aggregation=seq-mean-token-sum-norm", "seq_mean_token_sum_norm"),
        ("advantage.kind=reinforce++", "reinforce_plus_plus"),
        ("trainer.strategy=fsdp2", "fsdp"),
        ("trainer.loss.kl_kind=vanilla", None),  # no value of this key
        ("trainer.loss.kl_kind=true", None),
    ],
)
def test_a_value_of_another_trainer_is_recognized(file: str, wrong: str, right: str | None) -> None:
    message = refused(file, wrong)
    assert f"; did you mean {right}?" in message if right else "did you mean" not in message
