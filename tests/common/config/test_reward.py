"""Tests which reward sections are refused, and the error messages."""

import json

import pytest

from services.common.config.load import load, parse_json
from services.common.config.reward import RewardConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, Reason
from tests.common.config.smallest import SMALLEST, refused
from tests.support import raises


def parse(scorers: object, **settings: object) -> RewardConfig:
    return parse_json(RewardConfig, json.dumps({"scorers": scorers, **settings}))


HTTP = {"kind": "http", "url": "http://scorer.example:8000/score"}
JUDGE = {
    "kind": "judge", "url": "https://judge.example/v1/chat/completions", "model": "m", "template": "{completion}",
    "score_pattern": "([0-9]+)",
}  # fmt: skip


def test_a_judge_may_be_at_the_root_of_its_host():
    assert parse([JUDGE | {"url": "https://judge.example/"}]).scorers[0].component == "judge"


def test_names_default_to_the_kind_and_weights_to_one():
    config = parse([{"kind": "math"}, {"kind": "length", "target_tokens": 5, "max_tokens": 9, "weight": 0.1}])
    assert [scorer.component for scorer in config.scorers] == ["math", "length"]
    assert [scorer.weight for scorer in config.scorers] == [1.0, 0.1]
    assert config.on_failure == "drop_group"


def test_a_kind_may_be_used_twice_under_two_names():
    config = parse([{"kind": "exact"}, {"kind": "exact", "name": "loose", "ignore_case": True}])
    assert [scorer.component for scorer in config.scorers] == ["exact", "loose"]


@pytest.mark.parametrize(
    ("scorers", "problem"),
    [
        ([{"kind": "regex"}], "'regex' is none of exact, answer, gsm8k, math, format, length, python, judge, http"),
        ([{"kind": "exact"}, {"kind": "exact"}], "give each scorer a different `name`"),
        ([{"kind": "exact", "weight": float("inf")}], "finite"),
        ([{"kind": "exact", "ignorecase": True}], "ignore_case"),
        ([{"kind": "format"}], "pattern: required"),
        ([{"kind": "format", "pattern": "(a"}], "not a regular expression"),
        ([{"kind": "length", "target_tokens": 5, "max_tokens": 5}], "above target_tokens"),
        ([{"kind": "python", "path": "no_colon"}], "path"),
        ([{"kind": "python", "path": "os; import x:y"}], "path"),
        ([{"kind": "python", "path": "a.b:c", "kwargs": {"answer": 1}}], "kwargs answer"),
        ([HTTP | {"url": "ftp://host/"}], "must be http"),
        ([HTTP | {"url": "file:///etc/passwd"}], "must be http"),
        ([HTTP | {"url": "http://"}], "must be http"),
        ([HTTP | {"url": "http://host/ x"}], "must be http"),
        ([HTTP | {"url": "http://host:99999/"}], "its port is no number"),
        ([HTTP | {"url": "https://user:secret@host/"}], "must not contain credentials"),
        ([HTTP | {"api_key_file": "key"}], "unencrypted"),
        ([HTTP | {"api_key": "sk-1"}], "api_key"),
        ([JUDGE | {"url": "https://judge.example/v1/"}], "itself: https://judge.example/v1/chat/completions"),
        ([JUDGE | {"url": "https://judge.example"}], "itself: https://judge.example/v1/chat/completions"),
        ([JUDGE | {"extra_body": {"stream": True}}], "extra_body: must not have stream"),
        ([JUDGE | {"template": "{prompt}"}], "must have the field {completion}"),
        ([JUDGE | {"template": "{completion.__class__}"}], "got {completion.__class__}"),
        ([JUDGE | {"template": "{completion} {0}"}], "got {0}"),
        ([JUDGE | {"template": "{completion!r}"}], "a field must be just one of"),
        ([JUDGE | {"template": "{completion:>9{answer}}"}], "a field must be just one of"),
        ([JUDGE | {"template": "{completion} {"}], "template"),
        ([JUDGE | {"score_pattern": "([0-9]+"}], "not a regular expression"),
        ([JUDGE | {"score_pattern": "[0-9]+"}], "must have a group"),
        ([{"kind": "model"}], "path: required"),
        ([{"kind": "model", "path": "m", "device": "tpu"}], "device"),
        ([{"kind": "model", "path": "m", "trust_remote_code": True}], "trust_remote_code"),
    ],
)
def test_wrong_scorers_are_refused_in_words_that_help(scorers, problem):
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG) as caught:
        parse(scorers)
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "url", ["https://scorer.example", "http://127.0.0.1:8000", "http://[::1]/", "http://localhost"]
)
def test_a_key_may_go_over_tls_or_to_loopback(url):
    assert parse([HTTP | {"url": url, "api_key_file": "key"}]).scorers[0].url == url


@pytest.mark.parametrize(
    "setting", [{"timeout_s": 0}, {"num_workers": 0}, {"on_failure": "ignore"}, {"max_memory_gib": 0}, {"time_out": 1}]
)
def test_wrong_settings_are_refused_by_name(setting):
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field=next(iter(setting))):
        parse([{"kind": "exact"}], **setting)


@pytest.mark.parametrize(
    ("scorer", "reads"),
    [
        ({"kind": "exact"}, True),
        ({"kind": "python", "path": "a:b"}, True),
        (HTTP, True),
        ({"kind": "answer"}, True),
        ({"kind": "answer", "answers_key": "answers"}, False),
        ({"kind": "code"}, False),
        ({"kind": "code", "tests_key": None}, True),
        ({"kind": "format", "pattern": "a"}, False),
        ({"kind": "length", "target_tokens": 1, "max_tokens": 2}, False),
        ({"kind": "model", "path": "a"}, False),
        (JUDGE, False),
        ({**JUDGE, "template": "{completion} {answer}"}, True),
        ({**JUDGE, "template": "{completion} {{answer}}"}, False),
    ],
)
def test_which_scorers_read_the_answer(scorer: dict[str, object], reads: bool) -> None:
    assert parse([scorer]).reads_answers is reads


def test_a_prompt_leaves_an_environment_room_for_a_turn():
    settings = [f"{key}={json.dumps(value)}" for key, value in SMALLEST.items()]
    settings.append("environment={kind: tools, tools: [{kind: calculator}]}")
    message = refused(*settings, "rollout.max_model_len=1024")
    assert "data.max_prompt_tokens 1024 leaves no room for a turn below rollout.max_model_len = 1024" in message
    assert load(Config, [*settings, "rollout.max_model_len=1025"]).max_response_tokens == 1
    agent = "environment={kind: agent, path: 'a:b'}"
    assert load(Config, [*settings[:-1], agent, "rollout.max_model_len=1024"])  # it limits only the rows
