"""Tests what every config model refuses."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import services.common.config.load  # noqa: F401  imports all models
from services.common.config.base import Strict, help_of
from services.common.config.load import load, parse_json
from services.common.config.run import Config
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, Reason
from tests.common.config.smallest import SMALLEST, refused, write
from tests.support import raises


def models(base: type[Strict] = Strict) -> Iterator[type[Strict]]:
    for model in base.__subclasses__():
        if model.__module__.startswith("services."):
            yield model
            yield from models(model)


FLOATS = [
    (model, name)
    for model in sorted(set(models()), key=lambda model: model.__qualname__)
    for name, field in model.model_fields.items()
    if field.annotation in (float, float | None)
]
NOT_FINITE = [math.inf, -math.inf, math.nan, "inf", "-Infinity", "nan", "1e400"]


def problems(model: type[Strict], values: dict[str, Any]) -> dict[str, str]:
    """Returns the type of each problem by dotted key, of a table and of the same as JSON."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    with pytest.raises(ValidationError) as caught_json:
        model.model_validate_json(json.dumps(values))
    from_yaml, as_json = (
        {".".join(map(str, one["loc"])): one["type"] for one in error.value.errors()} for error in (caught, caught_json)
    )
    assert from_yaml == as_json
    return from_yaml


@pytest.mark.parametrize(("model", "name"), FLOATS, ids=[f"{model.__name__}.{name}" for model, name in FLOATS])
def test_every_number_is_finite(model: type[Strict], name: str) -> None:
    for value in NOT_FINITE:
        assert problems(model, {name: value})[name] == "finite_number"


def test_the_fields_that_were_tried_are_those_of_the_whole_config() -> None:
    names = {f"{model.__name__}.{name}" for model, name in FLOATS}
    assert {"OptimConfig.lr", "TrainerConfig.max_logprob_diff", "TimeoutsConfig.open_s", "KlConfig.target"} <= names
    assert len(names) > 60


@pytest.mark.parametrize(
    "override",
    [
        "rollout.engine={kv_cache_memory_bytes: .inf}",
        "rollout.engine={compilation_config: {a: [1, .nan]}}",
        "trainer.megatron.transformer_config_kwargs={moe_z_loss_coeff: -.inf}",
        "trainer.megatron.optimizer_config_kwargs={adam_beta1: .nan}",
        "reward.scorers=[{kind: python, path: 'm:f', kwargs: {limit: .inf}}]",
        "data.chat_template_kwargs={a: .nan}",
        "trainer.optim.betas=[0.9, .nan]",
        "trainer.loss.correction.token_mask=[0.5, .inf]",
        "trainer.max_logprob_diff=1e999",
        "trainer.optim.lr=inf",
    ],
)
def test_a_number_that_is_not_finite_is_refused_with_its_key(override: str, file: str) -> None:
    message = refused(file, override)
    assert "must be a finite number" in message
    assert message.startswith(override.partition("=")[0])


def test_a_norm_of_0_is_refused_with_what_turns_clipping_off(file: str) -> None:
    message = refused(file, "trainer.optim.max_grad_norm=0")
    assert message.startswith("trainer.optim.max_grad_norm: must be above 0, not 0; a large value, such as 1e9")
    assert load(Config, [file, "trainer.optim.max_grad_norm=1e9"]).trainer.optim.max_grad_norm == 1e9


@pytest.mark.parametrize(
    "override", ["timeouts.open_s=true", "trainer.optim.betas=[0.9, true]", "trainer.profiler.ranks=[true]"]
)
def test_a_truth_value_is_no_number(override: str, file: str) -> None:
    assert "must be a" in refused(file, override)


def test_a_service_refuses_one_too() -> None:
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="optim.lr"):
        parse_json(TrainerConfig, '{"optim": {"lr": Infinity}}')


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.optim.betas=[0.9, 1.0]", "trainer.optim.betas=[0.0, 0.99]"),
        ("trainer.optim.betas=[-0.1, 0.99]", "trainer.optim.betas=[0.9, 0]"),
        ("trainer.collective_timeout_s=1e10", "trainer.collective_timeout_s=1e9"),
        ("timeouts.train_s=1e300", "timeouts.train_s=1e9"),
        ("timeouts.lease_s=1e10", "timeouts.lease_s=1"),
        ("weights.timeout_s=1e10", "weights.timeout_s=1"),
        ("restart.window_s=1e10", "restart.window_s=1"),
        ("weights.bucket_bytes=10000000000000000000000", "weights.bucket_bytes=1099511627776"),
        ("trainer.profiler.ranks=[-1]", "trainer.profiler.ranks=[0]"),
        ("reward.max_memory_gib=1e30", "reward.max_memory_gib=1024"),
    ],
)
def test_what_a_service_would_refuse_later_is_refused_in_the_config(wrong: str, right: str, file: str) -> None:
    assert refused(file, wrong).startswith(wrong.partition("=")[0])
    load(Config, [file, right])


def test_every_key_has_help() -> None:
    keys = [(model, name) for model in models() for name in model.model_fields]
    assert [(model, name) for model, name in keys if not help_of(model).get(name)] == []


def test_paths_may_begin_at_home(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["model=~/m", "runs_dir=~/runs", "resume=~/c", "reference.model=~/r", "data.train=~/a.jsonl"]
    data = ["data.eval={t: ~/b.jsonl}", "data.chat_template=~/t.jinja", "rollout.discovery={kind: file, path: ~/f}"]
    config = load(Config, [file, *paths, *data])
    assert (config.model, config.runs_dir, config.resume) == ("/home/me/m", Path("/home/me/runs"), "/home/me/c")
    assert (config.reference.model, config.data.train) == ("/home/me/r", (Path("/home/me/a.jsonl"),))
    assert config.data.eval == {"t": Path("/home/me/b.jsonl")}
    assert config.data.chat_template == Path("/home/me/t.jinja")
    assert config.rollout.discovery and config.rollout.discovery.kind == "file"
    assert config.rollout.discovery.path == Path("/home/me/f")
    assert parse_json(Config, config.model_dump_json()) == config
    unchanged = load(Config, [file, "model=a/b~c", "data.train=[hf://datasets/a/b, x~]"])
    assert (unchanged.model, unchanged.data.train) == ("a/b~c", (Path("hf://datasets/a/b"), Path("x~")))


@pytest.mark.parametrize("word", ["on", "off"])
def test_on_and_off_may_be_written_without_quotes(tmp_path: Path, word: str) -> None:
    path = write(tmp_path, "c.yaml", json.dumps(SMALLEST)[:-1] + f", trainer: {{moe: {{router_replay: {word}}}}}}}")
    assert load(Config, [path]).trainer.moe.router_replay == word


@pytest.mark.parametrize(("part", "key"), [("curriculum", "low=0.2"), ("dynamic", "max_rounds=3")])
def test_keys_of_a_part_that_nobody_turned_on_are_refused(file: str, part: str, key: str):
    words = refused(file, f"selection.{part}.{key}")
    assert f"selection.{part}: {key.split('=')[0]} has no effect" in words
    assert "set enabled: true" in words
    turned_off = load(Config, [file, f"selection.{part}.{key}", f"selection.{part}.enabled=false"])
    assert parse_json(Config, turned_off.model_dump_json()) == turned_off


def test_roles_that_replay_nothing_may_have_routers_that_cannot(file: str):
    own = "{strategy: megatron, megatron: {transformer_config_kwargs: {moe_router_fusion: true}}}"
    config = load(Config, [file, "trainer.moe.router_replay=on", "trainer.loss.kl_coef=0.1", f"reference={own}"])
    assert parse_json(TrainerConfig, config.models["reference"].model_dump_json()).megatron.transformer_config_kwargs
