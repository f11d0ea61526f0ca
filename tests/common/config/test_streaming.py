"""Tests which runs are trained on in blocks, and the size of the blocks."""

from typing import Any

import pytest
import yaml

from services.common.config.run import Config
from services.common.config.streaming import block_growth, streams, tokens_per_block


def config(**changes: Any) -> Config:
    """Returns a config with 16 groups of 4 samples of up to 100 tokens, in micro-batches of 400 on each of two ranks.

    `changes` replace sections, or are merged into those that are tables.
    """
    settings: dict[str, Any] = {
        "model": "m",
        "data": {"train": "x.parquet", "prompts_per_step": 16, "max_prompt_tokens": 40},
        "rollout": {"completions_per_prompt": 4, "sampling": {"max_tokens": 60}, "max_model_len": 128},
        "reward": {"scorers": [{"kind": "exact"}]},
        "trainer": {"max_tokens_per_microbatch": 400, "num_ranks": 2},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
    return Config(**settings)


@pytest.mark.parametrize(
    ("num_groups", "max_tokens", "tokens"),
    [
        (16, 100, 100),  # the tokens of an average group are subtracted, at most half of those of the micro-batches
        (16, 400, 700),
        (16, 1600, 3100),
        (16, 1601, 0),
        (16, 16384, 0),
        (31, 100, 100),
        (32, 100, 300),  # a quarter of at most 12,800 tokens makes eight blocks of two micro-batches on each rank
    ],
)
def test_a_block_can_fill_a_microbatch_of_every_rank(num_groups: int, max_tokens: int, tokens: int) -> None:
    made = config(data={"prompts_per_step": num_groups}, trainer={"max_tokens_per_microbatch": max_tokens})
    assert (tokens_per_block(made), streams(made)) == (tokens, tokens > 0)


@pytest.mark.parametrize(("num_groups", "max_tokens", "growth"), [(16, 100, 0), (32, 100, 200), (64, 100, 200)])
def test_blocks_of_several_passes_grow_by_a_pass(num_groups: int, max_tokens: int, growth: int) -> None:
    made = config(data={"prompts_per_step": num_groups}, trainer={"max_tokens_per_microbatch": max_tokens})
    assert block_growth(made) == growth


def test_blocks_do_not_depend_on_whether_they_are_streamed() -> None:
    off = config(trainer={"streaming": "off"})
    assert (tokens_per_block(off), streams(off)) == (tokens_per_block(config()), False)


def test_a_trainer_that_shares_its_gpus_gets_whole_batches() -> None:
    shared = config(placement="colocated", rollout={"num_replicas": 2})
    assert (tokens_per_block(shared), streams(shared)) == (tokens_per_block(config()), False)


def test_off_needs_no_quotes_in_yaml() -> None:
    assert yaml.safe_load("streaming: off") == {"streaming": False}
    assert config(trainer={"streaming": False}).trainer.streaming == "off"
    with pytest.raises(ValueError, match="'auto' or 'off'"):
        config(trainer={"streaming": True})


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "max_rl", "rloo", "opo", "per_turn", "remax"])
def test_advantages_of_a_group(kind: str) -> None:
    assert streams(config(advantage={"kind": kind}))


MEGATRON = {"strategy": "megatron"}


@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
def test_both_backends_get_the_same_blocks(lora: dict[str, Any]) -> None:
    made = config(trainer=MEGATRON | {"lora": lora})
    assert (tokens_per_block(made), streams(made)) == (tokens_per_block(config()), True)


@pytest.mark.parametrize(
    ("stages", "max_tokens", "tokens"), [(1, 400, 700), (2, 100, 750), (2, 400, 3100), (2, 401, 0)]
)
def test_a_block_fills_a_pipeline(stages: int, max_tokens: int, tokens: int) -> None:
    layout = {"megatron": {"pipeline_model_parallel_size": stages}}
    made = config(trainer=MEGATRON | layout | {"max_tokens_per_microbatch": max_tokens})
    assert tokens_per_block(made) == tokens


@pytest.mark.parametrize(
    ("minibatches", "max_tokens", "tokens"),
    [
        (2, 100, 100),
        (2, 400, 700),
        (2, 16384, 32668),  # a mini-batch that fills no micro-batch is a block
        (16, 400, 700),
    ],
)
def test_minibatches_are_cut_too(minibatches: int, max_tokens: int, tokens: int) -> None:
    trainer = {"num_minibatches": minibatches, "max_tokens_per_microbatch": max_tokens}
    made = config(trainer=trainer)
    assert (tokens_per_block(made), streams(made)) == (tokens, True)
    off = config(trainer=trainer | {"streaming": "off"})
    assert (tokens_per_block(off), streams(off)) == (tokens, False)


WHOLE: dict[str, dict[str, Any]] = {
    "advantages of the whole batch": {"advantage": {"kind": "gpg"}},
    "components of the whole batch": {"advantage": {"kind": "gdpo", "components": {"exact": 1.0}}},
    "whitened over the batch": {"advantage": {"kind": "grpo", "whiten": "batch"}},
    "whitened by its kind": {"advantage": {"kind": "reinforce_plus_plus"}},
    "own advantages": {"advantage": {"kind": "python", "import_path": "a.b:c"}},
    "a critic": {"advantage": {"kind": "gae"}, "critic": {}},
    "several epochs": {"trainer": {"num_epochs": 2}},
    "several epochs of mini-batches": {"trainer": {"num_minibatches": 2, "num_epochs": 2}},
    "a loss that reads means of the batch": {"trainer": {"loss": {"kind": "clip_cov"}}},
    "a choice by arrival": {"selection": {"over_sampling": {"factor": 1.5, "keep": "arrival"}}},
    "a group smaller than the ranks": {"trainer": {"num_ranks": 8}},
    "a loss of the experts' router": {
        "trainer": MEGATRON | {"megatron": {"moe": {"load_balancing_type": "aux_loss", "aux_loss_coeff": 0.1}}}
    },
    "another one": {"trainer": MEGATRON | {"megatron": {"transformer_config_kwargs": {"moe_z_loss_coeff": 0.1}}}},
    "dropout": {"trainer": MEGATRON | {"lora": {"rank": 4, "dropout": 0.1}}},
}


@pytest.mark.parametrize("advantage", [{"kind": "distill"}, {"kind": "grpo", "distill_coef": 0.5}])
def test_a_teacher_changes_no_block(advantage: dict[str, Any]) -> None:
    made = config(advantage=advantage, teacher={"model": "t"})
    assert (tokens_per_block(made), streams(made)) == (tokens_per_block(config()), True)


@pytest.mark.parametrize("case", WHOLE)
def test_what_needs_the_whole_batch_is_not_cut(case: str) -> None:
    made = config(**WHOLE[case])
    assert (tokens_per_block(made), streams(made)) == (0, False)
