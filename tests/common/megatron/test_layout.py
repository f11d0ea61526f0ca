"""Tests the rules for parallel sizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.config.layout import check_layout, data_parallel_size
from services.common.config.megatron import MegatronConfig
from services.common.config.run import Config
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, Reason
from services.common.families.architecture import Architecture

DENSE = Architecture(
    model_type="qwen3",
    num_layers=12,
    hidden_size=96,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=8,
    intermediate_size=192,
    vocab_size=480,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
MOE = replace(
    DENSE, model_type="qwen3_moe", intermediate_size=0, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=36
)
LATENT = replace(DENSE, model_type="deepseek_v3", kv_lora_rank=32, qk_rope_head_dim=4, v_head_dim=8)
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP, VPP = "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"


def checked(num_ranks: int, megatron: Mapping[str, Any], **given: Any) -> None:
    check_layout(MegatronConfig(**megatron), num_ranks, **given)


# For each rule: a legal layout, illegal ones next to it, each as (ranks, sizes, model, tokens), and the error's words.
MODEL, TOKENS = "architecture", "max_tokens"
Case = tuple[int, dict[str, Any], dict[str, Any]]
HYBRID = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "use_precision_aware_optimizer": True}
STACKED = replace(MOE, model_type="gpt_oss")
RULES: dict[str, tuple[Case, list[Case], list[str]]] = {
    "world is TP x PP x CP x DP": (
        (12, {TP: 2, PP: 2, CP: 1}, {}),
        [(6, {TP: 2, PP: 2, CP: 1}, {})],
        ["trainer.num_ranks 6", "TP x PP x CP x DP", "2 x 2 x 1 = 4", "nearest legal: 4 or 8"],
    ),
    "float8 needs multiples of 16 on each rank": (
        (2, {"fp8": "blockwise"}, {MODEL: replace(DENSE, hidden_size=256, intermediate_size=512, head_dim=64)}),
        [
            (1, {"fp8": "tensorwise"}, {MODEL: replace(DENSE, intermediate_size=200)}),
            (4, {"fp8": "tensorwise", TP: 4}, {MODEL: replace(DENSE, intermediate_size=416)}),
        ],
        ["fp8 ", "on each rank", "multiples of 16", "nearest legal: none"],
    ),
    "experts are not computed in float8": (
        (1, {}, {MODEL: MOE}),
        [(1, {"fp8": "tensorwise"}, {MODEL: MOE}), (1, {"fp8": "blockwise"}, {MODEL: STACKED})],
        ["fp8 ", "each expert by itself", "nearest legal: none"],
    ),
    "float8 has a key of its own": (
        (1, {"fp8": "tensorwise"}, {}),
        [
            (1, {"transformer_config_kwargs": {"fp8": "hybrid"}}, {}),
            (1, {"transformer_config_kwargs": {"fp8_recipe": "delayed"}}, {}),
        ],
        ["transformer_config_kwargs.fp8", "use trainer.megatron.fp8"],
    ),
    "experts in one tensor are not distributed": (
        (2, {TP: 2}, {MODEL: STACKED}),
        [(2, {EP: 2}, {MODEL: STACKED})],
        ["expert_model_parallel_size 2", "in one tensor", "nearest legal: EP 1"],
    ),
    "experts in one tensor are computed together": (
        (1, {}, {MODEL: STACKED}),
        [(1, {"moe": {"grouped_gemm": False}}, {MODEL: STACKED})],
        ["moe.grouped_gemm false", "nearest legal: true"],
    ),
    "attention with windows cuts no sequences": (
        (2, {TP: 2}, {MODEL: STACKED}),
        [(2, {CP: 2}, {MODEL: STACKED})],
        ["context_parallel_size 2", "windows", "nearest legal: CP 1"],
    ),
    "world counts CP": ((4, {CP: 4}, {}), [(2, {CP: 4}, {})], ["1 x 1 x 4 = 4", "nearest legal: 4"]),
    "world is a multiple of PP x EP x ETP": (
        (8, {EP: 4}, {}),
        [(8, {EP: 3}, {}), (8, {EP: 3}, {MODEL: MOE})],
        ["expert_model_parallel_size 3", "PP x EP x ETP = 1 x 3 x 1", "nearest legal EP: 2 or 4", "num_ranks: 6 or 9"],
    ),
    "world is a multiple of both": (
        (12, {TP: 4, EP: 3, ETP: 2}, {}),
        [(8, {TP: 4, EP: 3, ETP: 2}, {})],
        ["nearest legal EP: 2 or 4", "num_ranks: 12"],
    ),
    "TP divides the heads": (
        (8, {TP: 4}, {MODEL: DENSE}),
        [(8, {TP: 8}, {MODEL: DENSE, TOKENS: 1001})],  # and not the tokens, which would be the next rule
        ["tensor_model_parallel_size 8", "num_attention_heads 12", "nearest legal: 4"],
    ),
    "TP divides the hidden size": (
        (4, {TP: 2}, {MODEL: replace(DENSE, hidden_size=98)}),
        [(4, {TP: 4}, {MODEL: replace(DENSE, hidden_size=98)})],
        ["tensor_model_parallel_size 4", "hidden_size 98", "nearest legal: 2"],
    ),
    "TP divides the vocabulary": (
        (4, {TP: 2}, {MODEL: replace(DENSE, vocab_size=482)}),
        [(4, {TP: 4}, {MODEL: replace(DENSE, vocab_size=482)})],
        ["tensor_model_parallel_size 4", "vocab_size 482", "nearest legal: 2"],
    ),
    "TP divides the feed-forward layer": (
        (4, {TP: 2}, {MODEL: replace(DENSE, intermediate_size=194)}),
        [(4, {TP: 4}, {MODEL: replace(DENSE, intermediate_size=194)})],
        ["tensor_model_parallel_size 4", "intermediate_size 194", "nearest legal: 2"],
    ),
    "TP divides the expert that computes every token": (
        (4, {TP: 2}, {MODEL: replace(MOE, model_type="qwen2_moe", shared_expert_intermediate_size=194)}),
        [(4, {TP: 4}, {MODEL: replace(MOE, model_type="qwen2_moe", shared_expert_intermediate_size=194)})],
        ["tensor_model_parallel_size 4", "shared_expert_intermediate_size 194", "nearest legal: 2"],
    ),
    "TP and the key-value heads divide": (
        (6, {TP: 6}, {MODEL: replace(DENSE, num_key_value_heads=3)}),
        [(4, {TP: 4}, {MODEL: replace(DENSE, num_key_value_heads=3)})],
        ["tensor_model_parallel_size 4", "num_key_value_heads 3", "nearest legal: 3 or 6"],
    ),
    "TP above the key-value heads cuts q, k, v evenly": (
        (12, {TP: 12}, {MODEL: replace(DENSE, head_dim=24)}),
        [(12, {TP: 12}, {MODEL: DENSE})],
        ["tensor_model_parallel_size 12", "rows of q, k and v 160", "nearest legal: 4"],
    ),
    "TP cuts no head of a key that is normed with the others": (
        (4, {TP: 4}, {MODEL: replace(DENSE, model_type="olmo2", head_dim=24)}),
        [(12, {TP: 12}, {MODEL: replace(DENSE, model_type="olmo2", head_dim=24)})],
        ["tensor_model_parallel_size 12", "num_key_value_heads 4", "nearest legal: 4"],
    ),
    "PP divides the layers": (
        (4, {PP: 4}, {MODEL: DENSE}),
        [(5, {PP: 5}, {MODEL: DENSE})],
        ["pipeline_model_parallel_size 5", "num_hidden_layers 12", "PP x VPP", "4 or 6"],
    ),
    "PP divides the layers between the ends": (
        (5, {PP: 5, "transformer_config_kwargs": {FIRST: 1, LAST: 2}}, {MODEL: DENSE}),
        [
            (5, {PP: 5, "transformer_config_kwargs": {FIRST: 1, LAST: 3}}, {MODEL: DENSE}),
            (2, {PP: 2, "transformer_config_kwargs": {FIRST: 5, LAST: 5}}, {MODEL: DENSE}),
            (2, {PP: 2, "transformer_config_kwargs": {FIRST: 12}}, {MODEL: DENSE}),
            (4, {PP: 2, VPP: 2, "transformer_config_kwargs": {FIRST: 5}}, {MODEL: DENSE}),
        ],
        ["pipeline_model_parallel_size", "num_hidden_layers 12", FIRST, LAST],
    ),
    "a number of layers": (
        (2, {PP: 2, "transformer_config_kwargs": {FIRST: 6}}, {}),
        [
            (2, {PP: 2, "transformer_config_kwargs": {FIRST: 0}}, {}),
            (2, {PP: 2, "transformer_config_kwargs": {FIRST: "6"}}, {}),
        ],
        [f"transformer_config_kwargs.{FIRST}", "is not a number of layers"],
    ),
    "PP x VPP divides the layers": (
        (6, {PP: 6, VPP: 2}, {MODEL: DENSE}),
        [(4, {PP: 4, VPP: 2}, {MODEL: DENSE})],
        ["pipeline_model_parallel_size 4", "PP x VPP = 4 x 2", "3 or 6"],
    ),
    "VPP needs PP": (
        (2, {PP: 2, VPP: 2}, {}),
        [(2, {VPP: 2}, {})],
        ["virtual_pipeline_model_parallel_size 2", "interleaving", "PP 2, or VPP null"],
    ),
    "EP needs experts": (
        (2, {EP: 2}, {MODEL: MOE}),
        [(2, {EP: 2}, {MODEL: DENSE}), (4, {TP: 2, EP: 2, ETP: 1}, {MODEL: DENSE})],
        ["expert_model_parallel_size 2", "qwen3 has no experts", "EP 1"],
    ),
    "ETP is TP if EP is 1": (
        (2, {TP: 2, ETP: 2}, {MODEL: MOE}),
        [(2, {TP: 2, ETP: 1}, {}), (2, {TP: 2, ETP: 1}, {MODEL: MOE}), (2, {TP: 2, ETP: 1}, {MODEL: DENSE})],
        ["expert_tensor_parallel_size 1", "ETP must be TP = 2", "ETP 2 or null, or EP of at least 2"],
    ),
    "EP divides the experts": (
        (6, {EP: 6}, {MODEL: MOE}),
        [(8, {EP: 8}, {MODEL: MOE})],
        ["expert_model_parallel_size 8", "num_experts 12", "nearest legal: 6 or 12"],
    ),
    "ETP divides an expert": (
        (12, {EP: 2, ETP: 6}, {MODEL: MOE}),
        [(16, {EP: 2, ETP: 8}, {MODEL: MOE})],
        ["expert_tensor_parallel_size 8", "moe_intermediate_size 36", "nearest legal: 6 or 9"],
    ),
    "experts with TP need sequence parallelism": (
        (2, {TP: 2, "sequence_parallel": False}, {MODEL: DENSE}),
        [
            (2, {TP: 2, "sequence_parallel": False}, {MODEL: MOE}),
            (2, {TP: 2, EP: 2, ETP: 1, "sequence_parallel": False}, {}),
        ],
        ["sequence_parallel false", "experts with TP 2", "true, null, or TP 1"],
    ),
    "latent keys with TP need sequence parallelism": (
        (2, {TP: 2}, {MODEL: LATENT}),
        [(2, {TP: 2, "sequence_parallel": False}, {MODEL: LATENT})],
        ["sequence_parallel false", "latent keys with TP 2", "true, null, or TP 1"],
    ),
    "the router is the model's": (
        (1, {"moe": {"router_score_function": "softmax", "router_enable_expert_bias": False}}, {MODEL: MOE}),
        [
            (1, {"moe": {"router_score_function": "sigmoid"}}, {MODEL: MOE}),
            (1, {"moe": {"router_score_function": "softmax"}}, {MODEL: replace(MOE, model_type="glm4_moe")}),
            (1, {"moe": {"router_enable_expert_bias": True}}, {MODEL: MOE}),
            (1, {"moe": {"router_enable_expert_bias": False}}, {MODEL: replace(MOE, model_type="glm4_moe")}),
        ],
        ["moe.router_", "the model's is", "or null"],
    ),
    "the flex dispatcher needs a group": (
        (2, {EP: 2, "moe": {"token_dispatcher_type": "flex"}}, {MODEL: MOE}),
        [(2, {"moe": {"token_dispatcher_type": "flex"}}, {MODEL: MOE})],
        ["moe.token_dispatcher_type flex", "EP x ETP", "alltoall, or EP 2"],
    ),
    "micro-batches divide by TP": (
        (4, {TP: 4}, {TOKENS: 1004}),
        [(4, {TP: 4}, {TOKENS: 1002})],
        ["trainer.max_tokens_per_microbatch 1002", "TP = 4", "legal: 1000 or 1004; TP must also divide", "heads"],
    ),
    "micro-batches divide by TP x 2 x CP": (
        (4, {TP: 2, CP: 2}, {TOKENS: 1000}),
        [(4, {TP: 2, CP: 2}, {TOKENS: 1004})],
        ["trainer.max_tokens_per_microbatch 1004", "TP x 2 x CP = 2 x 2 x 2", "nearest legal: 1000 or 1008"],
    ),
    "a size has one key": (
        (1, {"transformer_config_kwargs": {"attention_backend": "flash"}}, {}),
        [(1, {"transformer_config_kwargs": {TP: 2}}, {})],
        [f"transformer_config_kwargs.{TP}", f"use trainer.megatron.{TP}"],
    ),
    "the optimizer has one set of keys": (
        (1, {"optimizer_config_kwargs": {"use_precision_aware_optimizer": True}}, {}),
        [(1, {"optimizer_config_kwargs": {"lr": 1.0}}, {})],
        ["optimizer_config_kwargs.lr", "use trainer.optim.lr"],
    ),
    "all weights have one learning rate": (
        (1, {"optimizer_config_kwargs": {"apply_wd_to_qk_layernorm": True}}, {}),
        [(1, {"optimizer_config_kwargs": {"decoupled_lr": 1.0}}, {})],
        ["optimizer_config_kwargs.decoupled_lr", "use trainer.optim.lr, which is the rate of all weights"],
    ),
    "what nothing would apply is refused": (
        (1, {"transformer_config_kwargs": {"attention_backend": "flash"}}, {}),
        [(1, {"transformer_config_kwargs": {"qk_clip": True}}, {})],
        ["transformer_config_kwargs.qk_clip", "use nothing: Lockstep does not do it"],
    ),
    "Megatron's own FSDP is another strategy": (
        (1, {"ddp_config": {"overlap_grad_reduce": True}}, {}),
        [(1, {"ddp_config": {"use_megatron_fsdp": True}}, {})],
        ["ddp_config.use_megatron_fsdp", "use trainer.strategy fsdp"],
    ),
    "the hybrid optimizer says how much of it is on the processor": (
        (1, {"optimizer_config_kwargs": HYBRID}, {}),
        [(1, {"optimizer_config_kwargs": HYBRID | {"optimizer_offload_fraction": 0.0}}, {})],
        ["optimizer_config_kwargs.optimizer_cpu_offload", "set optimizer_offload_fraction too"],
    ),
    "the hybrid optimizer is a precision-aware one": (
        (1, {"optimizer_config_kwargs": HYBRID}, {}),
        [(1, {"optimizer_config_kwargs": HYBRID | {"use_precision_aware_optimizer": False}}, {})],
        ["optimizer_config_kwargs.optimizer_cpu_offload", "set use_precision_aware_optimizer too"],
    ),
    "the hybrid optimizer is a distributed one": (
        (2, {"optimizer_config_kwargs": HYBRID}, {}),
        [(2, {"optimizer_config_kwargs": HYBRID, "use_distributed_optimizer": False}, {})],
        ["use_distributed_optimizer False", "optimizer_cpu_offload needs True"],
    ),
    "the hybrid optimizer's state loads under all sizes": (
        (1, {"optimizer_config_kwargs": HYBRID}, {}),
        [(1, {"optimizer_config_kwargs": HYBRID, "fully_reshardable": False}, {})],
        ["fully_reshardable False", "optimizer_cpu_offload needs True"],
    ),
    "the hybrid optimizer's state stays where it is": (
        (1, {"optimizer_config_kwargs": HYBRID, "grad_offload": True}, {}),
        [(1, {"optimizer_config_kwargs": HYBRID, "optimizer_offload": True}, {})],
        ["optimizer_offload True", "set one of the two"],
    ),
    "the distributed optimizer has one key": (
        (1, {"ddp_config": {"overlap_grad_reduce": True}}, {}),
        [(1, {"ddp_config": {"use_distributed_optimizer": False}}, {})],
        ["ddp_config.use_distributed_optimizer", "use trainer.megatron.use_distributed_optimizer"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    (ranks, legal, given), illegal, words = RULES[rule]
    checked(ranks, legal, **given)
    for ranks, sizes, given in illegal:
        with pytest.raises(InvalidInput) as caught:
            checked(ranks, sizes, key="reference.megatron", **given)
        message, field = caught.value.message, caught.value.metadata["field"]
        assert all(word in message for word in words), message
        assert message.startswith(field + " ") and caught.value.reason is Reason.INVALID_CONFIG
        assert field.startswith("reference.megatron.") or "trainer.num_ranks" in field or TOKENS in field


SMALLEST: dict[str, Any] = {
    "model": "m",
    "data": {"train": "a.parquet", "prompts_per_step": 4, "max_prompt_tokens": 10},
    "rollout": {"sampling": {"max_tokens": 10}, "completions_per_prompt": 4, "max_model_len": 20},
    "reward": {"scorers": [{"kind": "exact"}]},
}


def config(**trainer: Any) -> Config:
    tree = {**SMALLEST, "trainer": {"strategy": "megatron", **trainer}}
    if "reference" in trainer:
        tree |= {"reference": tree["trainer"].pop("reference")}
        tree["trainer"]["loss"] = {"kl_coef": 0.1}
    return Config.model_validate(tree)


# Trainer sections that break a rule of the config, what the error must name, and a legal one next to each.
IN_CONFIG = {
    "layout": (
        {"num_ranks": 3, "megatron": {TP: 2}},
        ["trainer.num_ranks 3", "nearest legal: 2 or 4"],
        {"num_ranks": 4, "megatron": {TP: 2}},
    ),
    "layout of the reference": (
        {"num_ranks": 4, "reference": {"megatron": {EP: 3}}},
        ["reference.megatron.expert_model_parallel_size 3", "2 or 4"],
        {"num_ranks": 4, "reference": {"megatron": {EP: 2}}},
    ),
    "a sample for every data-parallel rank": (
        {"num_ranks": 32, "megatron": {PP: 2, TP: 2}, "num_minibatches": 4},
        ["4 samples", "trainer.num_ranks 32", "data-parallel size 8"],
        {"num_ranks": 32, "megatron": {PP: 4, TP: 2}, "num_minibatches": 4},
    ),
    "a sample for every data-parallel rank of the reference": (
        {"num_ranks": 32, "megatron": {TP: 8}, "reference": {"megatron": {}}, "max_tokens_per_microbatch": 80},
        ["16 samples", "reference.num_ranks 32"],
        {"num_ranks": 32, "megatron": {TP: 8}, "reference": {"megatron": {CP: 2}}, "max_tokens_per_microbatch": 80},
    ),
    "a sample for every stage of an interleaved pipeline": (
        {"num_ranks": 8, "megatron": {PP: 4, VPP: 2}, "num_minibatches": 4},
        ["4 samples", "data-parallel size 2", "x PP 4, interleaved", "at least 4"],
        {"num_ranks": 8, "megatron": {PP: 4, VPP: 2}, "num_minibatches": 2},
    ),
    "long samples spread evenly over rounds of an interleaved pipeline": (
        {"num_ranks": 8, "megatron": {PP: 4, VPP: 2}, "max_tokens_per_microbatch": 39},
        ["is not divisible by trainer.num_ranks 8 (data-parallel size 2", "x PP 4, interleaved", "at least 40"],
        {"num_ranks": 8, "megatron": {PP: 4, VPP: 2}, "max_tokens_per_microbatch": 40},
    ),
    "long samples spread evenly, padded": (
        # The longest has 20 tokens, 24 when padded to a multiple of TP x 2 x CP = 8.
        {"num_ranks": 12, "megatron": {TP: 2, CP: 2}, "max_tokens_per_microbatch": 40},
        ["is not divisible by trainer.num_ranks 12", "data-parallel size 3", "at least 48"],
        {"num_ranks": 12, "megatron": {TP: 2, CP: 2}, "max_tokens_per_microbatch": 48},
    ),
    "long samples spread evenly, reference": (
        {"num_ranks": 3, "megatron": {CP: 3}, "reference": {"megatron": {}}, "max_tokens_per_microbatch": 36},
        ["is not divisible by reference.num_ranks 3,", "at least 40"],
        {"num_ranks": 3, "megatron": {CP: 3}, "reference": {"megatron": {CP: 3}}, "max_tokens_per_microbatch": 36},
    ),
}


@pytest.mark.parametrize("rule", IN_CONFIG)
def test_rule_in_config(rule: str) -> None:
    wrong, words, right = IN_CONFIG[rule]
    with pytest.raises(ValidationError) as caught:
        config(**wrong)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    config(**right)


def test_fsdp_has_no_layout() -> None:
    """With FSDP all ranks are data-parallel, whatever the megatron section says."""
    trainer = TrainerConfig(strategy="fsdp", num_ranks=3, megatron=MegatronConfig(**{TP: 2}))
    assert data_parallel_size(trainer) == 3


def test_data_parallel_size() -> None:
    trainer = TrainerConfig(strategy="megatron", num_ranks=24, megatron=MegatronConfig(**{TP: 2, PP: 2, CP: 2}))
    assert data_parallel_size(trainer) == 3
    assert data_parallel_size(trainer.model_copy(update={"megatron": MegatronConfig(**{PP: 4})})) == 6
