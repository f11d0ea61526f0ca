"""Tests that `lockstep init` writes a config that `lockstep plan` accepts, for any number of GPUs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.cli.init import starting_config
from services.coordinator.cli.main import app
from services.coordinator.fleet.launch import Addresses
from services.coordinator.rl.session import load_data
from tests.support import ROOT

NAME = r"""it's: #1 # "two" \ é😀.jsonl"""
MODEL = ROOT / "deploy" / "quickstart" / "model"


def write(path: Path, **row: Any) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 8])
def test_plan_accepts_it(tmp_path: Path, num_gpus: int) -> None:
    data, out = write(tmp_path / NAME, question="1+1=", answer="2", level=1), tmp_path / "my-run.yaml"
    done = CliRunner().invoke(
        app, ["init", "--model", str(MODEL), "--data", str(data), "--out", str(out), "--gpus", str(num_gpus)]
    )
    assert done.exit_code == 0, done.output
    text, keys = out.read_text(), ("num_steps", "prompts_per_step", "num_replicas", "completions_per_prompt")
    assert "qwen3, 0.6M parameters" in text and ("--suggest" in text) == (num_gpus > 0)
    assert {line.index(" # ") for line in text.splitlines() if line.strip().startswith(keys)} == {32}  # a column
    config = load(Config, [str(out)])
    assert (config.name, config.model, config.data.train) == ("my-run", str(MODEL), (data,))
    assert (config.data.prompt_column, config.data.answer_column) == ("question", "answer")
    assert config.trainer.num_ranks + config.rollout.num_replicas == max(2, num_gpus)
    assert (config.placement == "colocated") == (num_gpus == 1)
    assert config.rollout.max_model_len <= json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    planned = CliRunner().invoke(app, ["plan", str(out), "--device", "gpu" if num_gpus else "cpu"])
    assert planned.exit_code == 0, planned.output


@pytest.mark.parametrize(("file", "name"), [("my run.yaml", "my-run"), ("_1é+b.c.yaml", "1-b.c"), ("é.yaml", "run")])
def test_the_name_is_one_that_a_run_may_have(tmp_path: Path, file: str, name: str) -> None:
    out = tmp_path / file
    out.write_text(starting_config(MODEL, write(tmp_path / "a.jsonl", prompt="1", answer="2"), out, num_gpus=0))
    assert load(Config, [str(out)]).name == name


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    data = write(tmp_path / "a.jsonl", prompt="1", answer="2")
    arguments = ["init", "--model", str(MODEL), "--data", str(data), "--out", str(tmp_path / "run.yaml")]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InvalidInput) and (tmp_path / "run.yaml").read_text() == "mine"


def test_messages_need_no_chat_key(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", prompt=[{"role": "user", "content": "x"}], solution="2")
    text = starting_config(MODEL, data, Path("x.yaml"), num_gpus=2)
    assert "chat: true" not in text and 'answer_column: "solution"' in text


def test_a_model_of_any_family(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    content = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(content | {"model_type": "cohere2"}))
    data = write(tmp_path / "a.jsonl", prompt="1", answer="2")
    text = starting_config(tmp_path / "model", data, Path("x.yaml"), num_gpus=0)
    assert "  # cohere2\n" in text and "lr: 1.0e-06}" in text and "0.2B parameters and more; see docs" in text


@pytest.mark.parametrize(("hidden_size", "lr"), [(64, 3e-4), (512, 1e-4), (1024, 1e-5), (2048, 1e-6)])
def test_a_smaller_model_gets_a_higher_rate(tmp_path: Path, hidden_size: int, lr: float) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    content = json.loads((MODEL / "config.json").read_text())
    size = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content | size))
    data = write(tmp_path / "a.jsonl", prompt="1", answer="2")
    text = starting_config(tmp_path / "model", data, Path("x.yaml"), num_gpus=0)
    (line,) = [line for line in text.splitlines() if "optim: " in line]
    assert f"lr: {lr:.1e}" in line and "M parameters; see docs/tuning.md" in line, line


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", prompt="1", gold="2")
    with pytest.raises(InvalidInput, match=r"no column of answers .* among prompt \(string\), gold \(string\)"):
        starting_config(MODEL, data, Path("x.yaml"), num_gpus=2)
    data = write(tmp_path / "a.jsonl", prompt="1", answer=2.5)
    with pytest.raises(InvalidInput, match=r"column answer is double, not text or integers: convert it, or .* extra$"):
        starting_config(MODEL, data, Path("x.yaml"), num_gpus=2)
    data = write(tmp_path / "a.jsonl", prompt="1", answer=2)
    assert "kind: exact" in starting_config(MODEL, data, Path("x.yaml"), num_gpus=2)


SCORERS = {
    "Paris": "{kind: exact}",
    "A": "{kind: exact}",
    "72": "{kind: exact}",
    "Half of 48 is 24.\n48 + 24 = 72\n#### 72": "{kind: gsm8k}",
    "#### Solution\nHalf of 48 is 24, and 48 + 24 makes 72.": "{kind: gsm8k}",
    "He sells 24 clips in May, and 72 in both months together.": "{kind: gsm8k}",
    r"Add them: the sum is $\boxed{\frac{1}{2}}$.": "{kind: math}",
    r"\frac{1}{2}": "{kind: math}",
    '["assert add(2, 3) == 5"]': "{kind: code, tests_key: null}",
    '{"inputs": ["2 3"], "outputs": ["5"]}': "{kind: code, tests_key: null}",
    '[{"input": "2 3", "output": "5"}]': "{kind: code, tests_key: null}",
}


@pytest.mark.parametrize("answer", SCORERS)
def test_the_scorer_fits_the_answers(tmp_path: Path, answer: str) -> None:
    data, out = write(tmp_path / "a.jsonl", prompt="1", answer=answer), tmp_path / "x.yaml"
    out.write_text(text := starting_config(MODEL, data, out, num_gpus=0))
    assert f"    - {SCORERS[answer]} " in text
    assert len(load(Config, [str(out)]).reward.scorers) == 1


@pytest.mark.parametrize(("name", "scorer"), [("tests", "{kind: code} "), ("test_list", "tests_key: test_list}")])
def test_a_column_of_tests_decides_before_the_answers(tmp_path: Path, name: str, scorer: str) -> None:
    row = {"prompt": "1", "answer": "def add(a, b): return a + b", name: ["assert add(2, 3) == 5"]}
    data, out = write(tmp_path / "a.jsonl", **row), tmp_path / "x.yaml"
    out.write_text(text := starting_config(MODEL, data, out, num_gpus=0))
    assert scorer in text and load(Config, [str(out)]).reward.scorers[0].component == "code"


@pytest.mark.parametrize(
    ("asks", "kind"),
    [(r"Put the final answer in \boxed{}.", "math"), ("Give the result after ####.", "gsm8k"), ("Be brief.", "exact")],
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_that_says_how_to_answer_decides(tmp_path: Path, asks: str, kind: str, is_chat: bool) -> None:
    prompt = [{"role": "user", "content": f"6 * 12?\n\n{asks}"}] if is_chat else f"6 * 12?\n\n{asks}"
    data = write(tmp_path / "a.jsonl", prompt=prompt, answer="72")
    assert f"    - {{kind: {kind}}} " in starting_config(MODEL, data, tmp_path / "x.yaml", num_gpus=0)


@pytest.mark.parametrize("column", ["reward_model", "reward_spec"])
def test_the_answer_may_be_a_field_of_a_column_as_in_the_files_of_verl_and_skyrl(tmp_path: Path, column: str) -> None:
    answers = ({"style": "rule", "ground_truth": truth} for truth in "12")
    rows = [{"prompt": f"{index}+1=", column: answer} for index, answer in enumerate(answers)]
    data, out = tmp_path / "verl.jsonl", tmp_path / "verl.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["init", "--model", str(MODEL), "--data", str(data), "--out", str(out)])
    assert done.exit_code == 0, done.output
    config = load(Config, [str(out), "data.prompts_per_step=2"])
    assert config.data.answer_column == f"{column}.ground_truth"
    read = load_data(config, Addresses())
    assert read is not None and [prompt.answer for prompt in read.train.prompts] == ["1", "2"]
    assert read.train.prompts[0].extra == {column: rows[0][column]}
    for name in ("answer", f"{column}.truth"):
        wrong = load(Config, [str(out), "data.prompts_per_step=2", f"data.answer_column={name}"])
        with pytest.raises(InvalidInput, match=rf"has no column {name}, .*did you mean {column}\.ground_truth\?"):
            load_data(wrong, Addresses())
