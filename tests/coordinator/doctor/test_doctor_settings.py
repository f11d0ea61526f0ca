"""Tests that `lockstep doctor` tries settings that only fail once services have started."""

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from services.common import process as extras
from services.common.config.run import Config
from services.common.import_path import load_function
from services.coordinator.doctor import Finding, Verdict, settings
from services.coordinator.doctor.inputs import examine_inputs, shown
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe import trackers
from tests.coordinator.doctor.findings import FAIL, OK, WARN, assert_fails, config_with
from tests.coordinator.fake_services import make_config, make_prompt
from tests.reward import reward_functions
from tests.support import ROOT


def check_scorer(name: str, **kwargs: object) -> Finding:
    path = f"tests.reward.reward_functions:{name}"
    scorers = [{"kind": "exact"}, {"kind": "python", "path": path, "kwargs": kwargs}]
    return settings.check_scorers(config_with(reward={"scorers": scorers}).reward)


def test_scorers_are_imported() -> None:
    finding = check_scorer("with_bonus", bonus=1)
    assert (finding.verdict, "reward_functions:with_bonus" in finding.result) == (OK, True), finding
    assert_fails(check_scorer("with_bonus", bonuss=1), FAIL, "unexpected keyword argument 'bonuss'", "path and kwargs")


@pytest.mark.long
def test_scorers_that_cannot_be_imported_are_named() -> None:
    assert_fails(check_scorer("is_nowhere"), FAIL, "no attribute 'is_nowhere'", "correct your code, or path")
    nowhere = config_with(reward={"scorers": [{"kind": "python", "path": "no_such_module:score"}]})
    assert_fails(
        settings.check_scorers(nowhere.reward), FAIL, "No module named", "from which the module can be imported"
    )


PLACE = f"reward_functions.py, line {inspect.getsourcelines(reward_functions.as_written)[1] + 2}"


def sample(completion: str) -> dict[str, object]:
    row = {"prompt": "6*7=", "answer": "42", "extra": {}}
    return {**row, "completion": completion, "num_tokens": 1, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("name", "verdict", "result"),
    [
        ("with_bonus", OK, "the answers of the first rows have rewards 1, 1"),
        ("not_a_number", FAIL, "python fails with ERROR"),
        ("trl_lengths", FAIL, "it uses completion_ids, which Lockstep does not pass to a function of TRL"),
        ("compute_score", FAIL, "no column 'data_source', which tests.reward.reward_functions:compute_score takes"),
        (
            "as_written",
            FAIL,
            f"KeyError: 'written' ({PLACE}), for the completion '42' of the prompt '6*7='; 4 of 4 samples",
        ),
        ("close_to", WARN, "for the completion '' of the prompt '6*7='; 2 of 4 samples"),
    ],
)
def test_scorers_score_the_first_rows(name: str, verdict: Verdict, result: str) -> None:
    scorers = [{"kind": "exact"}, {"kind": "python", "path": f"tests.reward.reward_functions:{name}"}]
    reward = config_with(reward={"scorers": scorers}).reward
    finding = settings.check_scorers(reward, [[sample("42"), sample("")]] * 2)
    assert (finding.verdict, result in finding.result) == (verdict, True), finding


def test_a_function_that_reads_messages_where_there_is_text_is_told_of_the_chat_template() -> None:
    scorers = [{"kind": "python", "path": "tests.reward.reward_functions:trl_accuracy", "kwargs": {"solution": ["42"]}}]
    reward = config_with(reward={"scorers": scorers}).reward
    assert_fails(settings.check_scorers(reward, [[sample("42")]]), FAIL, "TypeError: string indices", "set data.chat")


def test_scorers_read_the_answers_of_the_first_rows_by_the_name_of_their_column() -> None:
    scorer = {"kind": "python", "path": "tests.reward.reward_functions:reads_solution"}
    data = {"train": "x.parquet", "prompts_per_step": 8, "answer_column": "solution"}
    config = config_with(reward={"scorers": [scorer]}, data=data)
    (finding,) = settings.examine_scorers(config, Addresses(), [make_prompt(7)])
    assert (finding.verdict, "have rewards 1" in finding.result) == (OK, True), finding


def test_a_scorer_that_is_too_slow_is_given_more_time() -> None:
    scorers = [{"kind": "python", "path": "tests.reward.reward_functions:hangs"}]
    reward = config_with(reward={"scorers": scorers, "timeout_s": 0.5}).reward
    finding = settings.check_scorers(reward, [[sample("42")]])
    assert_fails(finding, FAIL, "TIMEOUT: no answer within 0.5 s (timeout_s)", "raise reward.timeout_s")
    reward = config_with(reward={"scorers": [{"kind": "math"}], "group_timeout_s": 0.5}).reward
    finding = settings.check_scorers(reward, [[sample("5") | {"answer": "(" * 900 + "1" + ")" * 900}]])
    assert_fails(finding, FAIL, "(a share of group_timeout_s)", "raise reward.group_timeout_s, or correct the rows")


def test_functions_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def loss(tokens, config): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'protos'}")

    def found(name: str, given: Addresses, **kwargs: object) -> list[Finding]:
        config = config_with(
            trainer={"loss": {"kind": "python", "import_path": f"mine:{name}", "kwargs": kwargs}},
            advantage={"kind": "python", "import_path": "statistics:fmean"},
        )
        return [finding for finding in settings.examine_settings(config, given) if finding.check == "functions"]

    (finding,) = found("loss", Addresses())
    assert (finding.verdict, finding.result) == (OK, "imported mine:loss, statistics:fmean")
    (wrong,) = found("nowhere", Addresses())
    assert_fails(wrong, FAIL, "trainer.loss.import_path: mine:nowhere cannot be imported", "import_path and kwargs")
    (unknown,) = found("loss", Addresses(), temperature=2)
    assert_fails(unknown, FAIL, "is called with (tokens, config, temperature=...), but is defined as", "kwargs")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert load_function("mine:loss", field="here")(None, None) is None
    (elsewhere,) = found("nowhere", Addresses(trainer="10.0.0.1:1"))
    assert (elsewhere.verdict, elsewhere.result) == (OK, "imported statistics:fmean")


# The real vLLM takes ten seconds to import.
WITH_FAKE_VLLM = """
import dataclasses, runpy, sys, types
sys.modules.update({name: types.ModuleType(name) for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils")})
arguments = dataclasses.make_dataclass("AsyncEngineArgs", ["enforce_eager", "gpu_memory_utilization"])
sys.modules["vllm.engine.arg_utils"].AsyncEngineArgs = arguments
runpy.run_module("services.rollout.probe", run_name="__main__")
"""


@pytest.mark.parametrize(
    "command",
    [("-c", WITH_FAKE_VLLM, "engine"), pytest.param(settings.ENGINE, marks=pytest.mark.long)],
    ids=["fake", "vllm"],
)
def test_engine_arguments(command: tuple[str, ...]) -> None:
    pytest.importorskip("vllm")
    config = config_with(rollout={"engine": {"enforce_eager": True, "gpu_memory_utilisation": 0.5}})
    finding = settings.check_engine(config, command)
    assert_fails(finding, FAIL, "did you mean gpu_memory_utilization?", "EngineArgs")
    assert "enforce_eager" not in finding.result
    assert settings.check_engine(config, ("-c", "print('{}')")).verdict is OK


def test_the_package_for_suffix_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(given: Addresses, **speculation: object) -> list[Finding]:
        config = config_with(rollout={"max_model_len": 4096, "speculation": speculation})
        return [finding for finding in settings.examine_settings(config, given) if finding.check == "suffix decoding"]

    monkeypatch.setattr(extras, "version", lambda package: "0.1.0")
    (other,) = found(Addresses(), kind="suffix")
    assert_fails(other, FAIL, "pip install arctic-inference==0.1.1", "install it")
    assert found(Addresses(), kind="ngram") == found(Addresses(rollout=("10.0.0.1:1",)), kind="suffix") == []
    monkeypatch.setattr(extras, "version", lambda package: "0.1.1")
    (same,) = found(Addresses(), kind="suffix")
    assert same.verdict is OK


def test_float8_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    corrected = {"loss": {"correction": {"weight": "token"}}}
    both = config_with(
        rollout={"precision": "fp8"}, trainer={"strategy": "megatron", "megatron": {"fp8": "tensorwise"}, **corrected}
    )

    def found(config: Config, given: Addresses) -> list[Finding]:
        return [finding for finding in settings.examine_settings(config, given) if finding.check == "float8"]

    monkeypatch.setattr(settings, "visible_gpus", list)
    assert_fails(*found(both, Addresses()), FAIL, "rollout.precision and trainer.megatron.fp8", "leave the keys out")
    assert_fails(*found(both, Addresses(trainer="h:1")), FAIL, "no GPU for rollout.precision", "leave the keys out")
    assert not found(both, Addresses(trainer="h:1", rollout=("h:2",)))
    assert not found(config_with(), Addresses())
    monkeypatch.setattr(settings, "visible_gpus", lambda: ["0"])
    assert [finding.verdict for finding in found(both, Addresses())] == [OK]


def test_lengths(tmp_path: Path) -> None:
    def lengths(**changes: object) -> Finding:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024} | changes))
        config = make_config(model=str(tmp_path), rollout={"max_model_len": 2048})
        (finding,) = settings.check_lengths(config)
        return finding

    assert_fails(
        lengths(), FAIL, "rollout.max_model_len 2048, the model's max_position_embeddings 1024", "at most 1024"
    )
    assert lengths(rope_scaling={"rope_type": "yarn", "factor": 4.0}).verdict is WARN
    assert lengths(rope_parameters={"rope_type": "linear", "factor": 4.0}).verdict is WARN
    assert lengths(rope_parameters={"rope_type": "llama3", "factor": 8.0}).verdict is FAIL
    assert lengths(max_position_embeddings=2048).verdict is OK


def test_memory_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"

    def memory(total_gib: int, free_gib: int) -> list[Finding]:
        meminfo.write_text(f"MemTotal: {total_gib << 20} kB\nMemAvailable: {free_gib << 20} kB\n")
        return list(settings.check_memory(config_with(), meminfo, tmp_path))

    monkeypatch.setattr(settings, "visible_gpus", list)
    assert memory(512, 256)[0].verdict is OK
    assert_fails(memory(512, 0)[0], WARN, "this host has 512.0", "lower trainer.max_tokens_per_microbatch")
    assert memory(0, 0)[0].verdict is FAIL
    for name, size in {"memory.max": 1 << 20, "memory.current": 0}.items():
        (tmp_path / name).write_text(f"{size}\n")
    assert_fails(memory(512, 256)[0], FAIL, "this host has 0.0", "lower trainer.max_tokens_per_microbatch")
    monkeypatch.setattr(settings, "visible_gpus", lambda: ["0"])
    assert memory(0, 0) == []


@pytest.mark.parametrize(
    ("observability", "results"),
    [
        ({"metrics_address": "127.0.0.1:9100", "otel_endpoint": "http://collector:4317"}, [OK, OK]),
        ({"metrics_address": "0.0.0.0:9100"}, [FAIL]),
        ({"metrics_address": "nohost"}, [FAIL]),
        ({"otel_endpoint": "collector"}, [FAIL]),
    ],
)
def test_addresses_of_metrics_and_spans_are_checked(observability: dict[str, str], results: list) -> None:
    config = config_with(observability=observability)
    findings = settings.examine_settings(config, Addresses(("r",), ("s",), "t"))
    assert [one.verdict for one in findings if one.check in ("metrics", "spans", "observability")] == results


def test_trackers_are_imported_and_w_and_b_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**tracker: str) -> Finding:
        config = config_with(observability={"trackers": [tracker]})
        (one,) = [
            one for one in settings.examine_settings(config, Addresses(("r",), ("s",), "t")) if one.check == "tracker"
        ]
        return one

    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for kind in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, kind, None)
        assert_fails(found(kind=kind), FAIL, f"{kind} cannot be imported", f"pip install 'lockstep-rl[{kind}]'")
        monkeypatch.setitem(sys.modules, kind, ModuleType(kind))
    assert found(kind="mlflow", uri="http://h:1").verdict is OK and found(kind="wandb", mode="offline").verdict is OK
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert_fails(found(kind="mlflow"), WARN, "no uri", "pip install mlflow")
    assert_fails(found(kind="wandb"), FAIL, "no API key", "wandb login")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    assert found(kind="wandb").verdict is OK
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert_fails(found(kind="wandb"), FAIL, "no API key", "wandb login")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert found(kind="wandb").verdict is OK


def test_a_text_that_commands_the_terminal_is_shown_as_a_literal() -> None:
    assert shown("a\x1b[2J\n") == repr("a\x1b[2J\n")
    assert shown("x" * 999) == f"{'x' * 200!r} ... {'x' * 200!r}"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"advantage": {"kind": "gae"}, "critic": {"model": "/nope"}}, "critic.model"),
        ({"advantage": {"kind": "distill"}, "teacher": {"model": "/nope"}}, "teacher.model"),
        ({"trainer": {"loss": {"kl_coef": 0.1}}, "reference": {"model": "/nope"}}, "reference.model"),
    ],
)
def test_the_missing_model_of_a_role_is_named(sections: dict[str, object], key: str, tmp_path: Path) -> None:
    config = config_with(**sections)
    model, *_ = examine_inputs(config, Addresses())
    assert_fails(model, FAIL, f"{key}: directory /nope does not exist", f"correct {key}")
    assert not list(settings.check_memory(config, tmp_path / "meminfo", tmp_path))  # another finding has said it
