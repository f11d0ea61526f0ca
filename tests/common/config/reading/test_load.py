"""Tests that files and overrides give one checked config, with errors that say what to change."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from services.common.config.load import keys, load, parse_json
from services.common.config.reward import ExactConfig, FormatConfig
from services.common.config.rollout import RolloutConfig
from services.common.config.run import Config
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, Reason
from tests.common.config.smallest import SMALLEST, refused, write


def test_defaults_are_filled_in(file: str) -> None:
    config = load(Config, [file])
    assert config.trainer.optim.lr == 1e-6
    assert config.data.train == (Path("a.parquet"),)
    assert config.run_dir == Path("runs/run")


def test_later_files_and_overrides_win(file: str, tmp_path: Path) -> None:
    more = write(tmp_path, "more.yaml", "trainer: {optim: {lr: 2.0e-6, eps: 1.0e-7}, num_ranks: 2}\nseed: 5")
    last = write(tmp_path, "last.yaml", "trainer: {optim: {lr: 3.0e-6}}")
    config = load(Config, [file, more, last])
    assert (config.trainer.optim.lr, config.trainer.optim.eps, config.trainer.num_ranks) == (3e-6, 1e-7, 2)
    config = load(Config, [file, "seed=1", more, "trainer.optim.lr=4e-6", "trainer.optim.lr=5e-6"])
    assert (config.seed, config.trainer.optim.lr) == (5, 5e-6)


def test_override_can_hold_any_yaml_value(file: str) -> None:
    config = load(
        Config, [file, "reward.scorers=[{kind: format, pattern: 'a=b.*'}]", "data.eval={short: x.parquet}", "name=a-b"]
    )
    assert config.reward.scorers == (FormatConfig(pattern="a=b.*"),)
    assert config.data.eval == {"short": Path("x.parquet")}
    # This value is longer than any file name may be.
    assert load(Config, [file, "data.system_prompt=" + "x" * 5000]).data.system_prompt == "x" * 5000


def test_a_table_of_another_kind_replaces_the_first(file: str, tmp_path: Path) -> None:
    played = write(tmp_path, "played.yaml", "environment: {kind: python, path: 'guess:Shop', max_turns: 3}")
    tools = "environment={kind: tools, tools: [{kind: calculator}]}"
    environment = load(Config, [file, played, tools]).environment
    assert environment and (environment.kind, environment.max_turns) == ("tools", 8)
    merged = load(Config, [file, played, "environment={kind: python, max_message_tokens: 5}"]).environment
    assert merged and (merged.max_turns, merged.max_message_tokens) == (3, 5)
    loss = load(
        Config, [file, "trainer.loss={kind: grpo, entropy_coef: 0.1}", "trainer.loss={kind: gspo}"]
    ).trainer.loss
    assert (loss.kind, loss.entropy_coef) == ("gspo", 0.1)  # the same keys whatever the kind


def test_an_empty_table_removes_entries_with_free_names(file: str) -> None:
    named = [file, "data.eval={a: a.parquet}", "rollout.engine={seed: 1}", "checkpoint={save_freq: 7}"]
    config = load(Config, [*named, "data.eval={}", "rollout.engine={}", "checkpoint={}"])
    assert (config.data.eval, config.rollout.engine, config.checkpoint.save_freq) == ({}, {}, 7)
    config = load(Config, [*named, "data.eval={b: b.parquet}"])
    assert sorted(config.data.eval) == ["a", "b"]


def test_file_name_may_hold_an_equals_sign(tmp_path: Path) -> None:
    assert load(Config, [write(tmp_path, "a=b.yaml", yaml.safe_dump(SMALLEST))]).model == "m"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("quux", None),
        ("rollout.nope", None),
        ("trainer.optim.lrr", "trainer.optim.lr"),
        ("trainer.optm.lr", "trainer.optim"),
        ("trainer.lr", "trainer.optim.lr"),
        ("sead", "seed"),
        ("rollout.sampling.temprature", "rollout.sampling.temperature"),
        ("data.prompt_per_step", "data.prompts_per_step"),
    ],
)
def test_unknown_key_names_the_nearest(file: str, tmp_path: Path, wrong: str, right: str | None) -> None:
    for source, args in (
        ("command line", [file, f"{wrong}=1"]),
        (str(tmp_path / "typo.yaml"), [file, write(tmp_path, "typo.yaml", yaml.safe_dump(_nested(wrong, 1)))]),
    ):
        message = refused(*args)
        # `trainer.optm.lr` is wrong from `optm` on.
        named = wrong if wrong != "trainer.optm.lr" else "trainer.optm"
        assert f"{named}: unknown key (from {source})" in message
        assert (f"did you mean {right}" if right else "lists every key") in message


def test_every_problem_is_told_at_once(file: str) -> None:
    message = refused(file, "sead=1", "trainer.optim.lr=-1", "trainer.num_ranks=two")
    assert all(part in message for part in ("did you mean seed", "trainer.optim.lr: ", "trainer.num_ranks: "))
    assert "'two' (from command line)" in message


@pytest.mark.parametrize(
    "override",
    [
        "trainer.optim.lr=fast",
        "trainer.optim.lr=0",
        "trainer.optim.betas=[0.9]",
        "trainer.strategy=megatrn",
        "seed=-1",
        "seed=1.5",
        "data=7",
        "name=a/b",
        "name=../up",
        "trainer.loss.kind=p3o",
        "reward.scorers=[]",
        "reward.scorers=[{kind: exactly}]",
        "reward.scorers=[{ignore_case: true}]",
        "reward.scorers=[{kind: format, pattern: '('}]",
        "reward.scorers=[{kind: exact}, {kind: exact}]",
        "reward.scorers=[{kind: length, target_tokens: 5, max_tokens: 5}]",
        "reward.scorers=[{kind: python, path: 'os'}]",
        "rollout.sampling.top_p=0.9",
        "rollout.sampling.top_k=1025",
        "reward.scorers.0.weight=2",
        "rollout.engine.speculative_config={method: ngram, num_speculative_tokens: 3}",
        "rollout.engine.gpu_memory_utilization=1.7",
        "rollout.engine.gpu_memory_utilization=0",
        "rollout.engine.gpu_memory_utilization=abc",
        "rollout.speculation={kind: medusa}",
        "rollout.speculation={kind: eagle3}",
        "rollout.speculation={kind: ngram, num_tokens: 17}",
    ],
)
def test_wrong_value_names_its_key(file: str, override: str) -> None:
    message = refused(file, override)
    key = override.partition("=")[0]
    for refused_by_its_section in (".top_p", ".top_k", ".speculative_config", ".gpu_memory_utilization", ".0.weight"):
        key = key.removesuffix(refused_by_its_section)
    assert key in message.replace(": ", ".")  # a section may name its key after a colon


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("num_steps=abc", "must be an integer, not 'abc' (from command line)"),
        ("trainer=3", "must be a table of keys, not 3"),
        ("trainer.optim.lr=fast", "must be a number, not 'fast'"),
        ("trainer.num_ranks=0", "must be at least 1, not 0"),
        ("checkpoint.save_freq=true", "checkpoint.save_freq: must be an integer, not True (from command line)"),
        ("reference.num_ranks=true", "must be an integer, not True"),
        ("trainer.optim.betas=[0.9, true]", "trainer.optim.betas: must be a number, not True"),
        ("environment={kind: python, path: 'a:B', max_turns: false}", "max_turns: must be an integer, not False"),
        ("trainer.optim.lr=0", "must be above 0"),
        ("trainer.strategy=deepspeed", "must be 'fsdp' or 'megatron', not 'deepspeed'"),
        ("trainer.gradient_checkpointing=maybe", "must be true or false, not 'maybe'"),
        ("reward.scorers=exact", "must be a list, not 'exact'"),
        ("reward.scorers=[exact]", "must be a table of keys, not 'exact'"),
        ("reward.scorers=[{weight: 1}]", "kind is required and not set"),
        ("name=a/b", "must match pattern"),
        ("reward.scorers=[{kind: python, path: my_rewards}]", "path: must be package.module:name, such as my_rewards:"),
        ("advantage={kind: python, import_path: f}", "import_path: must be package.module:name"),
    ],
)
def test_wrong_value_is_told_in_words(file: str, override: str, problem: str) -> None:
    message = refused(file, override)
    assert problem in message and "\n" not in message


def test_several_problems_have_a_line_each(file: str) -> None:
    first, *lines = refused(file, "sead=1", "trainer.num_ranks=two").splitlines()
    assert (first, len(lines)) == ("2 problems:", 2)
    assert all(line.startswith("  ") for line in lines)


def test_unknown_key_in_a_union_is_found(file: str) -> None:
    assert "ignore_case" in refused(file, "reward.scorers=[{kind: exact, ignore_cas: true}]")
    assert load(Config, [file, "reward.scorers=[{kind: exact, ignore_case: true}]"]).reward.scorers == (
        ExactConfig(ignore_case=True),
    )


def test_list_of_wrong_elements_is_not_called_empty(file: str) -> None:
    message = refused(file, "reward.scorers=[{kind: mathh}]")
    assert "reward.scorers.0: kind 'mathh' is none of exact, " in message and "at least one scorer" not in message
    assert "set at least one scorer, or an environment" in refused(file, "reward.scorers=[]")


def test_missing_keys_are_named() -> None:
    message = refused("seed=1")
    assert all(f"{key}: required and not set" in message for key in ("model", "data"))


@pytest.mark.parametrize("key", ["trainer.optim.lr", "seed"])
def test_a_key_without_a_value_is_no_missing_file(file: str, key: str) -> None:
    assert refused(file, key) == f"{key} is no file; to set this key, write {key}=VALUE"
    assert "does not exist" in refused(file, f"my-{key}")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(str(tmp_path / "none.yaml"))
    assert "cannot be read" in refused(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(str(tmp_path / "binary.yaml"))
    assert "is not YAML" in refused(write(tmp_path, "bad.yaml", "a: [1"))
    assert "table of keys" in refused(write(tmp_path, "list.yaml", "- 1"))
    assert "is not a YAML value" in refused("seed=[1")
    assert "is not YAML" in refused(write(tmp_path, "code.yaml", "a: !!python/object/apply:os.getcwd []"))


def test_key_that_is_set_twice_is_refused(tmp_path: Path) -> None:
    """YAML itself would keep the second value and silently forget the first."""
    text = yaml.safe_dump(SMALLEST) + "trainer: {num_ranks: 2}\ntrainer: {max_logprob_diff: 0.5}\n"
    message = refused(write(tmp_path, "twice.yaml", text))
    first, second = (number for number, line in enumerate(text.splitlines(), 1) if line.startswith("trainer:"))
    assert message.endswith(f"twice.yaml: trainer is set twice, in lines {first} and {second}: remove one")
    assert refused("data={a: 1, a: 2}").endswith("is not a YAML value: a is set twice, in line 1: remove one")


@pytest.mark.parametrize("number", ["1e3", "1.0e3", "1E+3", "10e2", "1000.0", "'1000'"])
def test_whole_numbers_may_be_written_with_an_exponent(file: str, tmp_path: Path, number: str) -> None:
    written = write(tmp_path, "more.yaml", f"data: {{max_prompt_tokens: {number}}}")
    assert load(Config, [file, written]).data.max_prompt_tokens == 1000
    assert load(Config, [file, f"num_steps={number}"]).num_steps == 1000
    assert "num_steps: must be an integer, not 0.001" in refused(file, "num_steps=1e-3")
    assert "num_steps: must be a finite number, not inf" in refused(file, "num_steps=1e400")


def test_numbers_in_tables_without_a_type_are_numbers(file: str) -> None:
    given = "data.chat_template_kwargs={a: 1e-3, b: .5e2, c: '1e3', d: 1e3x, e: e3, f: 12e4567}"
    values = load(Config, [file, given]).data.chat_template_kwargs
    assert values == {"a": 1e-3, "b": 50.0, "c": "1e3", "d": "1e3x", "e": "e3", "f": "12e4567"}


def test_a_file_may_begin_with_a_byte_order_mark(file: str, tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_text("num_steps: 7\n", encoding="utf-8-sig")
    assert load(Config, [file, str(tmp_path / "bom.yaml")]).num_steps == 7


def _nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def _default(path: str) -> Any:
    value: Any = Config.model_validate(SMALLEST)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _is_set(path: str) -> bool:
    """Returns whether the smallest config has the key. It has none in a list, a table by name, or a null table."""
    try:
        _default(path)
    except AttributeError:
        return False
    return True


SMALLEST_CONFIG = Config.model_validate(SMALLEST)
SMALLEST_DUMPED = SMALLEST_CONFIG.model_dump(mode="json")
ALL_KEYS = [key for key in keys(Config) if _is_set(key.path)]


def test_every_listed_key_can_be_set_on_the_command_line(file: str) -> None:
    """Sets all keys to the values that they have already, since any other may break a rule.

    The error of a wrong value shows that the key was read.
    """
    settings = []
    for path in (key.path for key in ALL_KEYS):
        dumped = SMALLEST_DUMPED
        for name in path.split("."):
            dumped = dumped[name]
        value = yaml.safe_dump(dumped, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
        settings.append(f"{path}={value}")
        # Dictionaries that are passed through accept any key, so they are left out. A key for text accepts any text, so
        # the wrong value is a table that holds a list in a list, which fits no other key.
        if not isinstance(_default(path), dict):
            assert path in refused(file, f"{path}={{wrong: [[]]}}")
    assert load(Config, [file, *settings]) == SMALLEST_CONFIG


def test_no_number_is_a_truth_value(file: str) -> None:
    numbers = [key.path for key in ALL_KEYS if type(_default(key.path)) in (int, float)]
    assert len(numbers) > 50
    assert [path for path in numbers if f"{path}: must be " not in refused(file, f"{path}=true")] == []
    config = load(Config, [file, "trainer.optim.lr=1", "data.shuffle=false", "rollout.engine={seed: true}"])
    assert (config.trainer.optim.lr, config.data.shuffle, config.rollout.engine) == (1.0, False, {"seed": True})


def test_every_key_is_listed_with_type_and_help() -> None:
    listed = {key.path: key for key in keys(Config)}
    assert listed["trainer.optim.lr"].default == "1e-06"
    assert listed["model"].default == "required"
    assert "reward.scorers[format].pattern" in listed
    assert [dataclasses.asdict(key) for key in listed.values() if not (key.type and key.help and key.default)] == []
    fields = sum(1 for _ in _leaves(Config))
    assert len(ALL_KEYS) == fields


def test_a_table_of_several_kinds_lists_what_all_have_once() -> None:
    paths = [key.path for key in keys(Config) if key.path.startswith("environment")]
    assert len(paths) == len(set(paths))
    assert [path for path in paths if path.endswith(".episode_s")] == ["environment.episode_s"]
    assert "environment[python].path" in paths and "environment[tools].tools[search].corpus" in paths
    assert "environment[textarena].kind" in paths and "environment.kind" not in paths


def _leaves(model: Any, prefix: str = "") -> Any:
    for name, field in model.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_config_is_frozen(file: str) -> None:
    config = load(Config, [file])
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.trainer.optim.lr = 1.0  # type: ignore[misc]


def test_sections_survive_the_wire(file: str) -> None:
    config = load(Config, [file, "trainer.optim.lr=0.30000000000000004", "rollout.engine={a: [1, null]}"])
    for section in (config.trainer, config.rollout, config.reward, config.data, config):
        assert parse_json(type(section), section.model_dump_json()) == section


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"optim": {"lrr": 1}}', '{"optim": {"lr": -1}}', "{"])
def test_section_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_json(TrainerConfig, text)
    assert caught.value.reason is Reason.INVALID_CONFIG
    if not text.startswith('{"'):
        assert caught.value.message.startswith("config_json: ") and caught.value.metadata["field"] == "config_json"
    if "lrr" in text:
        assert "did you mean optim.lr" in caught.value.message and "another version of Lockstep" in caught.value.message


def test_default_that_breaks_its_own_rule_is_noticed() -> None:
    # validate_default: a default is checked like any other value.
    assert RolloutConfig().engine == {}
    for model in (Config, TrainerConfig, RolloutConfig):
        assert model.model_config["validate_default"] and model.model_config["extra"] == "forbid"


def test_an_error_of_a_table_names_the_source_of_the_keys_that_it_is_about(tmp_path: Path) -> None:
    in_file = _nested("trainer.num_ranks", 1)["trainer"] | {"optim": {"lr": 1e-5}}
    path = write(tmp_path, "grpo.yaml", yaml.safe_dump(SMALLEST | {"trainer": in_file}))
    lora = ["trainer.lora.dropout=0.1", "trainer.lora.rank=2"]
    assert refused(path, *lora).endswith("(from command line)")
    assert "lora.dropout" in refused(path, *lora)
    in_file["lora"] = {"dropout": 0.1, "rank": 2}
    path = write(tmp_path, "grpo.yaml", yaml.safe_dump(SMALLEST | {"trainer": in_file}))
    assert refused(path, "trainer.optim.lr=1").endswith(f"(from {path})")
    assert refused(path, "trainer.strategy=fsdp").endswith(f"(from {path} and command line)")


def test_a_value_that_an_override_replaced_is_no_source(tmp_path: Path) -> None:
    path = write(tmp_path, "grpo.yaml", yaml.safe_dump(SMALLEST | {"seed": -1}))
    assert "(from command line)" in refused(path, "seed=-2")
    path = write(tmp_path, "grpo.yaml", yaml.safe_dump(SMALLEST | {"trainer": {"lora": 7}}))
    assert path not in refused(path, "trainer.lora={dropout: 0.1}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("environment={kind: python, pth: 'm:C'}", "environment.pth: unknown key"),
        ("environment={kind: tools, tools: [{kind: mcp, comand: [x]}]}", "environment.tools.0.comand: unknown key"),
        ("environment={kind: tools}", "environment.tools: required"),
        ("reward.scorers=[{kind: exact}, {kind: math, weight: x}]", "reward.scorers.1.weight: "),
    ],
)
def test_keys_are_named_as_they_are_written(override: str, key: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(Config, [override])
    assert key in caught.value.message and ".math" not in caught.value.message, caught.value.message
