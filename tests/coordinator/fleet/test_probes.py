"""Tests probes: their answers, and that prompts are measured, shown and dropped with the tools that they are sent with,
before anything starts."""

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.common.config.reward import AnswerConfig, CodeConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.data.dialog import Dialog
from services.coordinator.doctor import inputs
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.probes import Probe, known_tools
from services.coordinator.rl import evaluation, session
from services.coordinator.rl.session import load_data
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.conftest import CHATML
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S, raises

WITH_TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}" + CHATML
ENVIRONMENT = {"kind": "tools", "tools": [{"kind": "calculator"}]}


@pytest.fixture
def configured(make_model: Callable[..., Path], write_parquet: Callable[..., Path]) -> Callable[..., Config]:
    model = make_model(WITH_TOOLS)
    path = write_parquet(prompt=["1 + 1 =", "1 + " * 40 + "1 =", "2 + 2 ="], answer=["2", "41", "4"])

    def make(environment: Mapping[str, Any] = ENVIRONMENT, **data: Any) -> Config:
        data = {"train": path, "eval": {"held": path}, "prompts_per_step": 2, "chat": True, **data}
        return make_config(model=str(model), data=data, environment=environment)

    return make


def test_prompts_are_measured_as_they_are_sent(configured: Callable[..., Config]) -> None:
    config = configured()
    data = load_data(config, Addresses())
    assert data is not None
    dialog = Dialog(data.tokenizer, data.tools or (), config)
    plain = Tokenizer.load(Path(config.model))
    for prompts in (data.train.prompts, data.eval["held"]):
        for prompt in prompts:
            sent = plain.encode(plain.render(prompt.messages, tools=data.tools))
            assert list(prompt.tokens) == list(dialog.begin(prompt, ()).tokens) == sent
            assert "calculator" in prompt.text
    shown = next(one for one in inputs._prompts(config, Addresses(), None) if one.check == "first prompt")
    assert shown.result.startswith(f"{len(data.train.prompts[0].tokens)} tokens: ") and "calculator" in shown.result


def test_a_dry_run_shows_the_tokens_that_are_sent(configured: Callable[..., Config]) -> None:
    config = configured().model_copy(update={"environment": None})
    for chat, sent in ((False, "'<|endoftext|>1 + 1 ='"), (True, "'<|im_start|>system\\nYou")):
        data = config.data.model_copy(update={"chat": chat})
        found = [one.result for one in inputs._prompts(config.model_copy(update={"data": data}), Addresses(), None)]
        assert sent in found[1]


AGENT = {"kind": "agent", "path": "my_agent:run"}


@pytest.mark.parametrize("columns", [["levle"], ["answer"]])
def test_a_column_that_no_row_gives_to_the_agent_is_refused(configured: Callable[..., Config], columns: list[str]):
    with raises(InvalidInput, field="environment.columns"):
        load_data(configured({**AGENT, "columns": columns}), Addresses())
    listed = configured({**AGENT, "columns": ["answer"]}, extra_columns=["answer"])
    assert load_data(listed, Addresses())


@pytest.mark.parametrize(
    ("scorer", "key"), [(CodeConfig(), "tests_key"), (AnswerConfig(answers_key="tsts"), "answers_key")]
)
def test_a_column_that_no_row_gives_to_a_scorer_is_refused(configured: Callable[..., Config], scorer: Any, key: str):
    config = configured()
    changed = config.model_copy(update={"reward": config.reward.model_copy(update={"scorers": (scorer,)})})
    with raises(InvalidInput, field=f"reward.scorers[{scorer.component}].{key}"):
        load_data(changed, Addresses())


def test_a_held_out_set_needs_the_columns_too(
    configured: Callable[..., Config], write_parquet: Callable[..., Path]
) -> None:
    train = write_parquet("levels.parquet", prompt=["1 + 1 =", "2 + 2 ="], answer=["2", "4"], level=[1, 2])
    config = configured({**AGENT, "columns": ["level"]}, train=train)
    with raises(InvalidInput, field="environment.columns"):
        load_data(config, Addresses())
    with raises(InvalidInput, field="environment.columns"):
        evaluation._load(config, Tokenizer.load(Path(config.model)), tools=None)
    assert load_data(configured({**AGENT, "columns": ["level"]}, train=train, eval={"held": train}), Addresses())


def test_a_row_too_long_with_the_tools_is_dropped_or_refused_at_load(
    configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_data(configured(), Addresses())
    assert data is not None
    monkeypatch.setattr(session, "known_tools", lambda *_: data.tools)  # they are known now
    limit = max(len(data.train.prompts[index].tokens) for index in (0, 2))
    assert limit < len(data.train.prompts[1].tokens)
    with pytest.raises(InvalidInput, match=r"1 of 3 rows that are above data\.max_prompt_tokens"):
        load_data(configured(max_prompt_tokens=limit), Addresses())
    kept = load_data(configured(max_prompt_tokens=limit, overlong="drop"), Addresses())
    assert kept is not None
    assert [prompt.answer for prompt in kept.train.prompts] == [prompt.answer for prompt in kept.eval["held"]]
    assert [prompt.answer for prompt in kept.train.prompts] == ["2", "4"]
    larger = load_data(configured(max_prompt_tokens=2 * len(data.train.prompts[1].tokens)), Addresses())
    assert larger is not None and larger.train.digest == data.train.digest != kept.train.digest


def test_tools_that_prompts_do_not_show_or_that_run_elsewhere(configured: Callable[..., Config]) -> None:
    (tool,) = known_tools(configured(), Addresses()) or ()
    assert tool["function"]["name"] == "calculator"  # type: ignore[index]
    assert known_tools(configured(), Addresses(reward=("a:1",))) is None
    assert known_tools(configured({**ENVIRONMENT, "syntax": "tags"}), Addresses()) == []
    missing = {"kind": "tools", "tools": [{"kind": "function", "path": "no_such_module:f"}]}
    assert known_tools(configured(missing), Addresses()) is None


def test_an_answer_counts_although_the_process_that_gave_it_has_ended() -> None:
    with Probe(("-c", "print('{}')")) as probe:
        probe._process.wait(PATIENCE_S)
        assert probe.ask({}, PATIENCE_S) == {}


# It interrupts its parent after it was asked, and never answers.
_INTERRUPTS = "import os, signal; input(); os.kill(os.getppid(), signal.SIGUSR1); input()"


def test_an_interrupted_probe_does_not_keep_this_process_until_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[threading.Timer] = []

    class Noted(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Timer", Noted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), Probe(("-c", _INTERRUPTS), end_s=1.0) as probe:
            probe.ask({}, PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    timers[0].join(1.0)
    assert not timers[0].is_alive()
