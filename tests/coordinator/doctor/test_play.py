"""Tests what plays an environment without a model: `lockstep env try`, and the checks of a dry run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from services.common.errors import InvalidInput, NotFound
from services.coordinator.cli import groups
from services.coordinator.cli.environment import read_lines
from services.coordinator.cli.main import app
from services.coordinator.doctor import Verdict
from services.coordinator.doctor.inputs import check_environment, examine_environment
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.console import literal_console
from services.coordinator.rl.session import load_data
from tests.coordinator.conftest import CHATML
from tests.coordinator.doctor.findings import FAIL, OK, WARN, config_with

USER = "tests.reward.environments.user_environments"


@pytest.mark.parametrize(
    ("name", "row", "texts", "verdict", "words"),
    [
        ("OneThread", {"file": "/dev/null"}, ("42", ""), OK, "opens, and plays"),
        ("Guess", {}, ("3", ""), WARN, "step(''): ValueError"),
        pytest.param(
            *("Actor", {"reset": "raises"}, ("", ""), FAIL, "reset: KeyError: 'column'"), marks=pytest.mark.long
        ),
        ("Actor", {}, ("raises", "exits"), FAIL, "step: KeyError: 'column'"),
        pytest.param(
            *("Actor", {}, ("has_no_role", ""), WARN, "step('has_no_role'): a message must have role"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("Harmful", {"prompt": "bad"}, ("42", ""), FAIL, "step: no reply within 5 s"), marks=pytest.mark.long
        ),
    ],
)
def test_a_dry_run_plays_a_row(
    name: str, row: dict[str, str], texts: tuple[str, str], verdict: Verdict, words: str
) -> None:
    kwargs = {"kwargs": {"rows": ["bad"], "how": "queries"}} if name == "Harmful" else {}
    section = config_with(environment={"kind": "python", "path": f"{USER}:{name}", "turn_s": 5.0, **kwargs}).environment
    assert section is not None
    begin = {"reset": row, "seed": 7}
    finding = check_environment(section, calls=[begin, {"step": texts[0]}, begin, {"step": texts[1]}])
    assert (finding.verdict, words in finding.result) == (verdict, True), finding.result
    assert verdict is OK or finding.fix


def test_replies_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    path.write_bytes('\ufeff"a\\nb"\r\none\u2028two\r\n"x\x0cy\x85"\n\n5\n'.encode())
    assert list(read_lines(path)) == ["a\nb", "one\u2028two", '"x\x0cy\x85"', "", "5"]
    path.write_bytes(b"")
    assert list(read_lines(path)) == []


def write_config(tmp_path: Path, environment: dict[str, Any]) -> Path:
    rows = {"prompt": ["1+1=", " ", "1+2="], "answer": ["1", "2", "3"], "journal": [str(tmp_path / "journal")] * 3}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    data = {"train": str(tmp_path / "train.parquet"), "prompts_per_step": 2, "bad_rows": "drop"}
    config = config_with()
    scorers = [{"kind": "exact"}] if environment["kind"] == "tools" else []  # tools give no rewards
    content = {"model": str(config.model), "num_steps": 1, "data": data, "reward": {"scorers": scorers}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**content, "environment": {"turn_s": 60.0, **environment}}))
    return path


def test_a_dry_run_plays_the_first_row_of_the_data(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    from services.common.config.load import load
    from services.common.config.run import Config

    chat = [f"model={make_model()}", "data.chat=true", "data.max_prompt_tokens=1000", "environment.max_tokens=1000"]
    config = load(Config, [str(write_config(tmp_path, {"kind": "python", "path": f"{USER}:Journal"})), *chat])
    (finding,) = examine_environment(config, Addresses(), load_data(config, Addresses()))
    assert finding.verdict is OK, finding
    journal = (tmp_path / "journal").read_text().splitlines()
    assert journal[1:3] == ["step 1", "close"] and journal[4:] == ["step ", "close"]
    assert journal[0] == journal[3] and journal[0].startswith("reset ")

    config = load(Config, [str(write_config(tmp_path, {"kind": "python", "path": f"{USER}:Guess"}))])
    (finding,) = examine_environment(config, Addresses(), load_data(config, Addresses()))
    assert (finding.verdict, "a message follows raw text" in finding.result) == (FAIL, True), finding
    assert finding.fix == "correct data.chat"


def tried(config: Path, *arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["env", "try", str(config), *arguments], input=typed)


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_console", literal_console())  # of the output that the runner puts in place


@pytest.mark.parametrize("how", ["texts", pytest.param("file", marks=pytest.mark.long), "typed"])
def test_an_episode_is_played_without_a_model(tmp_path: Path, how: str) -> None:
    config = write_config(tmp_path, {"kind": "python", "path": f"{USER}:Journal"})
    (tmp_path / "replies").write_text('hi\n"done"\nnever\n')
    texts = ("--policy-text", "hi", "--policy-text", "done")
    arguments = {"texts": texts, "file": ("--replies", str(tmp_path / "replies")), "typed": ()}[how]
    done = tried(config, "--row", "2", *arguments, typed="hi\ndone\n" if how == "typed" else "")
    assert done.exit_code == 0, done.output
    shown = [line.removeprefix("policy> ") for line in done.stdout.splitlines()]  # stderr may have the log too
    assert shown[0].startswith("python 1/") and "prompt 2-" in shown[0]
    assert shown[1:] == [
        *("[text] 1+2=", "[system] be brief", "[user] ?"),
        *("--- turn 1", "[policy] hi", "reward 2", "[user] HI"),
        *("--- turn 2", "[policy] done", "reward 4, done", "[user] DONE"),
    ]
    assert (tmp_path / "journal").read_text().splitlines()[1:] == ["step hi", "step done", "close"]


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
CALCULATOR = {"kind": "tools", "tools": [{"kind": "calculator"}]}


def test_tools_and_limits_are_shown(tmp_path: Path) -> None:
    config = write_config(tmp_path, {**CALCULATOR, "max_turns": 1})
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools | tojson }}{% for message in messages %}{{ message.content }}\n{% endfor %}")
    content = yaml.safe_load(config.read_text())
    content["data"]["chat_template"] = str(template)
    config.write_text(yaml.safe_dump(content))
    done = tried(config, "--policy-text", CALL)
    assert done.exit_code == 0
    assert "tool: {" in done.output and 'calls calculator({"expression": "6*7"})' in done.output
    assert "[tool calculator] 42" in done.output and "environment.max_turns: 1 turns were played" in done.output


def test_a_call_within_the_reasoning_that_the_template_begins_is_none(
    tmp_path: Path, make_model: Callable[..., Path]
) -> None:
    thinking = "{{ tools | tojson }}" + CHATML.replace("assistant\n", "assistant\n<think>\n")
    chat = [f"model={make_model(thinking)}", "data.chat=true", "data.max_prompt_tokens=1000"]
    config = write_config(tmp_path, CALCULATOR)
    thought = tried(config, *chat, "--policy-text", CALL).output
    assert "begins each turn within reasoning" in thought and "[tool calculator]" not in thought
    assert "[tool calculator] 42" in tried(config, *chat, "--policy-text", f"6*7</think>{CALL}").output


def test_a_failure_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"kind": "python", "path": f"{USER}:Actor"})
    done = tried(config, "--policy-text", "raises")
    assert done.exit_code == 1 and "environment: crashed: KeyError: 'column'" in done.output
    assert "no more turns of the policy" in tried(config, "--policy-text", "").output


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--row", "1", "--policy-text", "hi"], NotFound, "no row 1 that can be used"),
        (["--row", "9", "--policy-text", "hi"], NotFound, "no row 9"),
        (["--replies", "/no/such/file"], InvalidInput, "/no/such/file cannot be read"),
        (["environment.path=no_such:Class", "--policy-text", "hi"], InvalidInput, "does not open"),
        (["environment=null", "reward.scorers=[{kind: exact}]"], InvalidInput, "none to play"),
    ],
)
def test_what_cannot_be_played_is_refused(
    tmp_path: Path, arguments: list[str], error: type[Exception], words: str
) -> None:
    done = tried(write_config(tmp_path, {"kind": "python", "path": f"{USER}:Actor"}), *arguments)
    assert isinstance(done.exception, error) and words in str(done.exception), done.output
