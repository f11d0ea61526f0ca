"""Tests the config of a supervised run: defaults, and settings that are refused before anything starts."""

from pathlib import Path

import pytest
import yaml

from services.common.config.load import keys, load
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from tests.support import ROOT

SMALLEST = {
    "model": "m",
    "num_steps": 3,
    "data": {"train": "x.parquet", "samples_per_step": 8},
    "trainer": {"num_ranks": 2},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    return str(path)


def test_the_loss_is_supervised_unless_said_otherwise(file: str) -> None:
    config = load(SftConfig, [file, "trainer.loss.aggregation=seq_mean_token_mean"])
    assert (config.trainer.loss.kind, config.trainer.loss.aggregation) == ("sft", "seq_mean_token_mean")
    assert config.data.train == (Path("x.parquet"),)
    # What the trainer service reads.
    assert TrainerConfig.model_validate_json(config.trainer.model_dump_json()) == config.trainer
    assert SftConfig.model_validate_json(config.model_dump_json()) == config


def test_the_example_is_legal() -> None:
    config = load(SftConfig, [str(ROOT / "deploy" / "runs" / "sft.yaml")])
    assert config.trainer.loss.kind == "sft"


def test_every_key_has_help() -> None:
    assert all(key.help for key in keys(SftConfig))


MEGATRON = ["trainer.strategy=megatron", "trainer.num_ranks=8", "trainer.megatron.tensor_model_parallel_size=4"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["trainer.loss.kind=grpo"], ["trainer.loss.kind grpo", "rewards"]),
        (["trainer.loss.kl_coef=0.1"], ["trainer.loss.kl_coef"]),
        (["num_epochs=2"], ["either num_steps or num_epochs"]),
        (["trainer.num_epochs=2"], ["trainer.num_epochs", "set num_epochs"]),
        (["checkpoint.save_freq=1", "checkpoint.max_batches_to_keep=2"], ["checkpoint.max_batches_to_keep"]),
        (["num_steps=null"], ["either num_steps or num_epochs"]),
        (
            ["trainer.num_minibatches=3"],
            ["samples_per_step 8", "num_minibatches 3", "nearest: 6 or 9, or set num_minibatches to a divisor of 8"],
        ),
        (["trainer.num_ranks=9"], ["8 samples", "num_ranks 9", "together 9"]),
        (["data.max_tokens=20000"], ["max_tokens_per_microbatch 16384", "at least 20000"]),
        (["trainer.num_ranks=3", "data.max_tokens=9000"], ["at least 18000", "do not divide"]),
        (["evaluation.eval_freq=1"], ["eval_freq", "data.eval"]),
        (
            ["data.eval={t: b.parquet}", "evaluation={eval_freq: 1, early_stopping: eval/t/loss}"],
            ["eval/t/loss: t has no loss, only nll, perplexity"],
        ),
        (["data.samples_per_setp=1"], ["did you mean data.samples_per_step?"]),
        (["trainer.megatron.async_save=true"], ["trainer.megatron.async_save", "trainer.strategy=megatron"]),
        ([*MEGATRON, "trainer.megatron.pipeline_model_parallel_size=3"], ["num_ranks 8", "nearest legal: 12"]),
        (
            [*MEGATRON, "data.max_tokens=4095", "trainer.max_tokens_per_microbatch=4095"],
            ["trainer.max_tokens_per_microbatch"],
        ),
    ],
)
def test_what_cannot_work_is_refused(file: str, changes: list[str], words: list[str]) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(SftConfig, [file, *changes])
    for word in words:
        assert word in refused.value.message


@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        (SftConfig, "quickstart.yaml", "`lockstep run`, not of `lockstep sft`: it has data.prompts_per_step"),
        (Config, "sft.yaml", "`lockstep sft`, not of `lockstep run`: it has data.samples_per_step"),
    ],
)
def test_a_config_of_the_other_command_is_told(model: type[SftConfig | Config], name: str, words: str) -> None:
    file = str(ROOT / "deploy" / "runs" / name)
    with pytest.raises(InvalidInput, match=words):
        load(model, [file])
    both = "data={samples_per_step: 8, prompts_per_step: 8}"  # a wrong key in a config of this command
    with pytest.raises(InvalidInput, match="unknown key"):
        load(model, [file, both])
