"""Tests estimates of memory against sums computed by hand, and against measurements on GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.config.rollout import RolloutConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.common.families.architecture import Architecture, make_architecture
from services.coordinator.planning import activations
from services.coordinator.planning.memory import (
    Memory,
    cache_token_bytes,
    engine_weights,
    fsdp_memory,
    publication,
    rank_memory,
    stage_memory,
)
from services.trainer.updates import logprobs
from tests.coordinator.planning.small_models import DENSE, MOE, make, sizes, write
from tests.support import ROOT, raises

# The matrices of q, k and v, with 128 + 64 + 64 rows, and that of o.
ATTENTION = 64 * 256 + 128 * 64
AWARE = {"use_precision_aware_optimizer": True}
HYBRID = AWARE | {"optimizer_cpu_offload": True}
# The two norms of a layer, and those of q and k.
NORMS = 2 * 64 + 2 * 32


def test_dense_memory(dense: Path) -> None:
    """Checks TP 2 x PP 2 x CP 2 x DP 2. Both stages have the tied embedding, because the last has the output layer."""
    config, model = make(dense, num_ranks=16, megatron=sizes(tp=2, pp=2, cp=2, grad_offload=True))
    layer = ATTENTION // 2 + 3 * 64 * 128 // 2 + NORMS
    embedding, tokens = 256 * 64 // 2, 16384 // 2
    first = stage_memory(config, model, 0, is_gpu=True)
    assert first.parameters == 4 * layer + embedding
    assert (first.weights, first.gradients) == (2 * first.parameters, 4 * first.parameters)
    assert first.optimizer == 12 * first.parameters // 4
    # Bytes per token and TP rank: 4 hidden inputs, q and o's input, k and v, those of the norms of q and k, then gate,
    # up and their product.
    assert first.activations == 4 * tokens * 2 * (4 * 64 + 2 * 128 + 2 * 64 + (128 + 64) + 3 * 128) // 2
    assert first.in_flight == 2
    last = stage_memory(config, model, 1, is_gpu=True)
    assert (last.parameters, last.in_flight) == (4 * layer + embedding + 64, 1)
    # Working memory per token: three times the feed-forward width, which TP cuts, and three hidden states.
    working = tokens * 2 * (3 * 128 // 2 + 3 * 64)
    assert first.peak == first.weights + first.gradients + first.optimizer + 2 * first.activations + working
    # The last stage also has the logits: 4 bytes each, and the float32 gradient of the output layer.
    assert last.microbatch.backward == max(working, 4 * tokens * 256 // 2 + 4 * embedding)
    assert first.idle == first.weights + first.optimizer


def test_tied_embedding_of_one_stage_is_held_once(dense: Path) -> None:
    config, model = make(dense)
    assert stage_memory(config, model, 0, is_gpu=True).parameters == model.num_parameters
    assert model.num_parameters == 8 * (ATTENTION + 3 * 64 * 128 + NORMS) + 256 * 64 + 64


def test_moe_memory(moe: Path) -> None:
    """Checks TP 2 x DP 4 and, on the same 8 ranks, ETP 1 x EP 4 x 2 copies: each rank has two experts of each layer."""
    config, model = make(moe, num_ranks=8, megatron=sizes(tp=2, ep=4, etp=1), gradient_checkpointing=True)
    router = 8 * 64
    dense = 8 * (ATTENTION // 2 + NORMS + router) + 2 * 256 * 64 // 2 + 64
    experts = 8 * 2 * 3 * 64 * 32
    memory = stage_memory(config, model, 0, is_gpu=True)
    assert memory.parameters == dense + experts
    assert memory.optimizer == 12 * dense // 4 + 12 * experts // 2
    assert memory.activations == 8 * 16384 * 2 * 64 // 2  # layer inputs, sharded by sequence parallelism
    config, _ = make(moe, num_ranks=8, megatron=sizes(tp=2, ep=4, etp=1))
    expert = 2 * (3 * 32 + 2 * 64)
    whole = 2 * (4 * 64 + 2 * 128 + 2 * 64 + (128 + 64) + expert) // 2
    assert stage_memory(config, model, 0, is_gpu=True).activations == 8 * 16384 * whole
    # With ETP 2, both ranks of an expert receive its tokens, and each computes half of its width.
    config, _ = make(moe, num_ranks=8, megatron=sizes(tp=2, ep=4, etp=2))
    assert stage_memory(config, model, 0, is_gpu=True).activations == 8 * 16384 * (whole + 2 * 2 * 2 * 64 // 2)


def test_memory_of_an_expert_that_computes_every_token(tmp_path: Path) -> None:
    """TP cuts such an expert like a dense feed-forward layer, and every EP rank has it. Its gate is not cut."""
    content = MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96}
    config, model = make(write(tmp_path / "shared", content), num_ranks=4, megatron=sizes(tp=2, ep=4, etp=1))
    attention = (ATTENTION + 256) // 2  # the biases of q, k and v
    dense = 8 * (attention + 2 * 64 + 8 * 64 + 3 * 64 * 96 // 2 + 64) + 2 * 256 * 64 // 2 + 64
    memory = stage_memory(config, model, 0, is_gpu=True)
    assert memory.parameters == dense + 8 * 2 * 3 * 64 * 32
    expert = 2 * (3 * 32 + 2 * 64)
    assert memory.activations == 8 * 16384 * 2 * (4 * 64 + 2 * 128 + 2 * 64 + 3 * 96 + expert) // 2


def test_layers_of_two_kinds_and_stages_of_other_sizes(tmp_path: Path) -> None:
    """Checks 3 + 5 layers, the first two of them dense, of which the second stage has none."""
    content = MOE | {"mlp_only_layers": [0, 1], "intermediate_size": 1024}
    uneven = sizes(pp=2, transformer_config_kwargs={"num_layers_in_first_pipeline_stage": 3})
    config, model = make(write(tmp_path / "model", content), num_ranks=2, megatron=uneven)
    first, last = (stage_memory(config, model, pp, is_gpu=True) for pp in range(2))
    shared, dense, experts = ATTENTION + NORMS, 3 * 64 * 1024, 8 * 64 + 8 * 3 * 64 * 32
    assert first.parameters == 3 * shared + 2 * dense + experts + 256 * 64
    assert last.parameters == 5 * (shared + experts) + 256 * 64 + 64
    assert first.parameters + last.parameters == model.num_parameters
    tokens = 16384
    attention = 4 * 64 + 2 * 128 + 2 * 64 + (128 + 64)
    routed = 2 * (3 * 32 + 2 * 64)
    assert first.activations == tokens * 2 * (3 * attention + 2 * 3 * 1024 + routed)
    assert last.activations == tokens * 2 * 5 * (attention + routed)
    # Working memory is that of the widest layer of the stage.
    assert (first.microbatch.forward, last.microbatch.forward) == (
        tokens * 2 * (3 * 1024 + 3 * 64),
        max(tokens * 2 * (3 * 128 + 3 * 64), 4 * tokens * 256),
    )
    recomputed = config.trainer.model_copy(update={"gradient_checkpointing": True})
    block = recomputed.megatron.model_copy(update={"recompute_method": "block", "recompute_num_layers": 1})
    config = config.model_copy(update={"trainer": recomputed.model_copy(update={"megatron": block})})
    first = stage_memory(config, model, 0, is_gpu=True)  # it recomputes one dense layer
    assert first.activations == tokens * 2 * (2 * attention + 3 * 1024 + routed + 64)
    alone = fsdp_memory(config, model, is_gpu=True)
    assert alone.gathered == 2 * (2 * (shared + dense) + 2 * 256 * 64 + 64)


def test_memory_of_latent_attention(tmp_path: Path) -> None:
    """TP cuts what is made from the latents; every rank has the latents' matrices and norms, and vLLM their cache."""
    latent = {"kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32}
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4}
    content = MOE | latent | experts | {"model_type": "deepseek_v3"}
    config, model = make(write(tmp_path / "latent", content), num_ranks=4, megatron=sizes(tp=2, ep=4, etp=1))
    whole = 64 * 40 + 40 + 64 * (48 + 8) + 48
    cut = 40 * 4 * 24 + 48 * 4 * (16 + 32) + 4 * 32 * 64
    dense = 8 * (whole + cut // 2 + 2 * 64 + 8 * 64 + 8 + 3 * 64 * 32 // 2) + 2 * 256 * 64 // 2 + 64
    memory = stage_memory(config, model, 0, is_gpu=True)
    assert memory.parameters == dense + 8 * 2 * 3 * 64 * 32
    # Inputs and outputs of the latents' norms; queries and keys, values and outputs of the heads; the shared expert.
    kept = 4 * 64 + 2 * (40 + 48) + 2 * 4 * 24 + 2 * 4 * 32 + 3 * 32
    assert memory.activations == 8 * 16384 * 2 * (kept + 2 * (3 * 32 + 2 * 64)) // 2
    assert cache_token_bytes(config, model) == 2 * 8 * (48 + 8)
    config, _ = make(tmp_path / "latent", num_ranks=4, megatron=sizes(tp=2, ep=4, etp=1), lora={"rank": 4})
    adapters = 4 * 8 * (64 + 40 + 64 + 48 + 8 + 40 + 4 * 24 // 2 + 48 + 4 * 48 // 2 + 4 * 32 // 2 + 64)
    shared = 4 * 8 * (64 + 2 * 32 // 2 + 32 // 2 + 64)
    assert stage_memory(config, model, 0, is_gpu=True).gradients == 4 * (adapters + shared)


def test_keys_that_change_memory(dense: Path) -> None:
    def memory(megatron: dict[str, Any] | None = None, **trainer: Any) -> Memory:
        config, model = make(dense, num_ranks=4, megatron={**sizes(tp=2), **(megatron or {})}, **trainer)
        return stage_memory(config, model, 0, is_gpu=True)

    plain = memory()
    count = plain.parameters
    assert memory({"use_distributed_optimizer": False}).optimizer == 12 * count == 2 * plain.optimizer
    full = memory(compute_dtype="float32")
    assert (full.weights, full.optimizer) == (4 * count, 8 * count // 2)  # the weights are their own master copy
    away = memory({"auto_offload": True})
    assert away.idle == 0 and away.peak == away.weights + away.gradients + away.activations + away.microbatch.backward
    # Without sequence parallelism the four hidden inputs of a layer are whole on every TP rank.
    whole = memory({"sequence_parallel": False}).activations - plain.activations
    assert whole == 8 * 16384 * 2 * 4 * 64 // 2
    layer_input, layer = 16384 * 2 * 64 // 2, plain.activations // 8
    saving = {"gradient_checkpointing": True}
    assert memory({"recompute_num_layers": 3}, **saving).activations == 3 * layer_input
    block = memory({"recompute_method": "block", "recompute_num_layers": 3}, **saving).activations
    assert block == 3 * layer_input + 5 * layer
    assert memory({"recompute_granularity": "selective"}, **saving).activations == plain.activations
    assert memory(loss={"kl_coef": 0.1}).reference == plain.weights
    own = {"megatron": sizes(pp=4)}
    last = 2 * (ATTENTION + 3 * 64 * 128 + NORMS) + 256 * 64 + 64
    assert memory(loss={"kl_coef": 0.1}, reference=own).reference == 2 * last
    assert memory(loss={"kl_coef": 0.1}, lora={"rank": 4}).reference == 0


@pytest.mark.parametrize(
    ("changes", "gradient", "optimizer"),
    [
        ({"ddp_config": {"grad_reduce_in_fp32": False}}, 2, 12),
        ({"optimizer_config_kwargs": {"use_precision_aware_optimizer": True}}, 4, 12),
        ({"optimizer_config_kwargs": {"exp_avg_dtype": "bf16"}}, 4, 12),  # Megatron ignores it without the former
        ({"optimizer_config_kwargs": AWARE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "BF16"}}, 4, 8),
        ({"optimizer_config_kwargs": AWARE, "fully_reshardable": False}, 4, 10),
        ({"optimizer_config_kwargs": AWARE | {"main_params_dtype": "fp16"}}, 4, 10),
        ({"optimizer_config_kwargs": HYBRID | {"optimizer_offload_fraction": 0.75}}, 4, 3),
        ({"optimizer_config_kwargs": AWARE | {"optimizer_offload_fraction": 0.75}}, 4, 12),
    ],
)
def test_dtypes_and_places_of_optimizer_state(
    dense: Path, changes: dict[str, Any], gradient: int, optimizer: int
) -> None:
    config, model = make(dense, num_ranks=1, megatron=changes)
    memory = stage_memory(config, model, 0, is_gpu=True)
    assert memory.gradients == gradient * memory.parameters
    assert memory.optimizer == optimizer * memory.parameters


BFLOAT16 = {"ddp_config": {"grad_reduce_in_fp32": False}}
REMAINDERS = {"optimizer_config_kwargs": AWARE, "fully_reshardable": False}


@pytest.mark.parametrize(
    ("changes", "num_bytes", "copies"),
    [
        ({}, 18, 0),
        (BFLOAT16, 16, 4),  # Megatron's optimizer makes float32 gradients from the bfloat16 ones
        ({"optimizer_config_kwargs": AWARE}, 18, 0),
        (REMAINDERS, 16, 0),
        (BFLOAT16 | {"optimizer_config_kwargs": AWARE}, 16, 0),
        (BFLOAT16 | REMAINDERS, 14, 0),
    ],
)
def test_bytes_of_a_trained_weight(dense: Path, changes: dict[str, Any], num_bytes: int, copies: int) -> None:
    config, model = make(dense, num_ranks=1, megatron=changes)
    memory = stage_memory(config, model, 0, is_gpu=True)
    assert memory.weights + memory.gradients + memory.optimizer == num_bytes * memory.parameters
    assert memory.gradient_copies == copies * memory.parameters
    assert memory.phases["optimizer"] == memory.idle == (num_bytes + copies) * memory.parameters
    held = memory.activations + memory.microbatch.backward  # the copies do not exist in the backward pass
    assert memory.phases["backward"] == num_bytes * memory.parameters + held


@pytest.mark.parametrize(("tied", "ddp", "num_bytes"), [(False, {}, 2), (True, {}, 4), (False, BFLOAT16, 4)])
def test_gradient_of_the_output_layer(tmp_path: Path, tied: bool, ddp: dict[str, Any], num_bytes: int) -> None:
    """It is added to float32 gradients at once, unless the layer is tied, so that autograd only needs its dtype."""
    wide = write(tmp_path / "wide", DENSE | {"vocab_size": 2**17, "tie_word_embeddings": tied})
    config, model = make(wide, num_ranks=1, megatron=ddp)
    assert stage_memory(config, model, 0, is_gpu=True).microbatch.backward == 4 * 2**28 + num_bytes * 2**17 * 64
    frozen, _ = make(wide, num_ranks=1, lora={"rank": 4})
    assert stage_memory(frozen, model, 0, is_gpu=True).microbatch.backward == 4 * 2**28


def test_unknown_dtype_of_optimizer_state_is_named(dense: Path) -> None:
    config, model = make(dense, megatron={"optimizer_config_kwargs": AWARE | {"exp_avg_dtype": "bfloat16"}})
    with raises(InvalidInput, field="trainer.megatron.optimizer_config_kwargs.exp_avg_dtype"):
        stage_memory(config, model, 0, is_gpu=True)


def test_micro_batches_in_flight_of_an_interleaved_pipeline(dense: Path) -> None:
    """Checks arXiv 2205.05198: stage 0 holds 1 + (PP - 1) / (PP x VPP) times the activations of the whole model."""
    megatron = sizes(pp=4, virtual_pipeline_model_parallel_size=2)
    config, model = make(dense, num_ranks=4, megatron=megatron)
    assert stage_memory(config, model, 0, is_gpu=True).in_flight == 4 * (1 + 3 / 8)
    assert stage_memory(config, model, 3, is_gpu=True).in_flight == 2.5


def test_adapters_are_all_that_is_trained(dense: Path) -> None:
    lora = {"rank": 4, "target_modules": ["linear_qkv", "linear_proj"], "publish": "adapter"}
    config, model = make(dense, num_ranks=2, megatron=sizes(tp=2), lora=lora)
    memory = stage_memory(config, model, 0, is_gpu=True)
    # q, k and v share the first matrix, which is whole on each rank; for o the second matrix is whole.
    adapters = 8 * 4 * ((64 + 256 // 2) + (128 // 2 + 64))
    assert memory.gradients == 4 * adapters and memory.optimizer == 12 * adapters
    assert memory.weights == 2 * (memory.parameters + adapters)
    # Published in the engine's layout: two matrices each for q, k, v and o.
    sent, buckets = publication(config, model, is_gpu=True)
    assert sent == 2 * 8 * 4 * ((64 + 128) + (64 + 64) + (64 + 64) + (128 + 64))
    assert buckets == 1
    canonical, _ = make(dense, num_ranks=2, megatron=sizes(tp=2), lora={"rank": 4, "kind": "canonical_lora"})
    assert stage_memory(canonical, model, 0, is_gpu=True).gradients == 4 * 8 * 4 * (
        3 * 64 + 256 // 2 + (128 // 2 + 64) + 2 * (64 + 128 // 2) + (128 // 2 + 64)
    )


def test_adapters_are_all_that_fsdp_trains(dense: Path) -> None:
    lora = {"rank": 4, "target_modules": ["linear_qkv"]}
    config, model = make(dense, strategy="fsdp", num_ranks=2, lora=lora)
    memory, adapters = fsdp_memory(config, model, is_gpu=True), 8 * 4 * (64 + 256)
    assert memory.gradients == 4 * adapters and memory.optimizer == 8 * adapters // 2
    assert memory.weights == 2 * memory.parameters + 4 * adapters // 2  # the base is bfloat16


def test_adapters_of_matrices_that_checkpoints_fuse(tmp_path: Path) -> None:
    """The adapters are trained as in any family, but published with two matrices for q, k and v together."""
    lora = {"rank": 4, "target_modules": ["linear_qkv", "linear_fc1"], "publish": "adapter"}
    config, model = make(write(tmp_path / "phi3", DENSE | {"model_type": "phi3"}), lora=lora)
    adapters = 8 * 4 * ((64 + 256) + (64 + 2 * 128))
    assert stage_memory(config, model, 0, is_gpu=True).gradients == 4 * adapters
    assert publication(config, model, is_gpu=True)[0] == 2 * adapters


def test_publication_is_cut_as_the_trainer_cuts_it(dense: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from services.common.weights.plan import Plan

    hf = transformers.AutoConfig.from_pretrained(dense)
    with torch.device("meta"):
        causal_lm = transformers.AutoModelForCausalLM.from_config(hf).bfloat16()
    config, model = make(dense)
    sent = Plan.of(causal_lm.named_parameters(), bucket_bytes=config.bucket_bytes)
    assert publication(config, model, is_gpu=True) == (sent.num_bytes, len(sent.buckets))
    assert len(sent.buckets) > 5


def test_float8_halves_the_engines_layers_and_adds_copies_to_the_trainers(dense: Path) -> None:
    config, model = make(dense)
    matrices = 8 * ((4 + 2 * 2) * 32 * 64 + 4 * 32 * 64 + 3 * 64 * 128)  # of all layers, without norms
    quantized = config.model_copy(update={"rollout": RolloutConfig(precision="fp8", kv_cache_dtype="fp8")})
    assert engine_weights(config, model) - engine_weights(quantized, model) == matrices
    assert cache_token_bytes(quantized, model) * 2 == cache_token_bytes(config, model)
    whole, *parts = (
        cache_token_bytes(config.model_copy(update={"rollout": RolloutConfig(tensor_parallel_size=tp)}), model)
        for tp in (1, 2, 4)
    )
    assert parts == [whole // 2] * 2  # with two heads of keys, two of four workers hold the same head
    split = sizes(tp=2, pp=2)
    plain, _ = make(dense, num_ranks=4, megatron=split)
    config, _ = make(dense, num_ranks=4, megatron=split | {"fp8": "tensorwise"})
    before, after = (stage_memory(one, model, 0, is_gpu=True) for one in (plain, config))
    assert after.gathered - before.gathered == 2 * matrices // 4
    assert after.phases["backward"] - before.phases["backward"] == 2 * matrices // 4
    assert after.phases["optimizer"] == before.phases["optimizer"]


def test_fsdp_memory(dense: Path) -> None:
    config, model = make(dense, strategy="fsdp", num_ranks=4)
    memory, count = fsdp_memory(config, model, is_gpu=True), model.num_parameters // 4
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * count, 4 * model.num_parameters, 8 * count)
    backward = memory.activations + memory.microbatch.backward + memory.gathered
    assert (memory.peak, memory.idle) == (12 * count + 4 * model.num_parameters + backward, 12 * count)
    # Gathered in bfloat16 are the embedding, the last norm, and two of the eight layers.
    layer = ATTENTION + 3 * 64 * 128 + NORMS
    assert memory.gathered == 2 * (256 * 64 + 64 + 2 * layer)
    reducing, _ = make(dense, strategy="fsdp", num_ranks=4, fsdp={"reduce_each_microbatch": True})
    assert fsdp_memory(reducing, model, is_gpu=True).peak == 16 * count + backward
    muon, _ = make(dense, strategy="fsdp", num_ranks=4, optim={"kind": "muon"})
    assert fsdp_memory(muon, model, is_gpu=True).optimizer == 8 * count - 4 * (8 * (layer - NORMS) // 4)


def first_rank(config: Config, model: Architecture, *, is_gpu: bool) -> Memory:
    return next(iter(rank_memory(config, model, is_gpu=is_gpu).values()))


def test_dtype_auto_is_that_of_the_device(dense: Path) -> None:
    for strategy in ("fsdp", "megatron"):
        config, model = make(dense, strategy=strategy)
        gpu, cpu = first_rank(config, model, is_gpu=True), first_rank(config, model, is_gpu=False)
        assert cpu.activations > 2 * gpu.activations
        assert publication(config, model, is_gpu=False)[0] == 2 * publication(config, model, is_gpu=True)[0]
        assert cpu.base > gpu.base == 0
    assert cpu.weights == 2 * gpu.weights
    given, _ = make(dense, compute_dtype="bfloat16")
    assert first_rank(given, model, is_gpu=False).weights == gpu.weights


def test_a_mini_batch_smaller_than_the_budget_is_one_micro_batch(dense: Path) -> None:
    """On one rank, 64 samples of up to 4096 tokens exceed the budget; on 64 ranks, each has one sample."""
    whole = fsdp_memory(*make(dense, strategy="fsdp", num_ranks=1), is_gpu=True).activations
    each = fsdp_memory(*make(dense, strategy="fsdp", num_ranks=64), is_gpu=True).activations
    assert whole == 4 * each


def test_logits_are_cut_into_pieces(tmp_path: Path) -> None:
    """On CPU, 64 Mi logits exist at a time, with 21 bytes each: those of 512 tokens with a vocabulary of 2^17."""
    config, model = make(write(tmp_path / "wide", DENSE | {"vocab_size": 2**17}), strategy="fsdp")
    gradient = 4 * 2**17 * 64
    assert fsdp_memory(config, model, is_gpu=False).microbatch.backward == 21 * 2**26 + gradient
    assert fsdp_memory(config, model, is_gpu=True).microbatch.backward == 4 * 2**28 + gradient
    exact, _ = make(tmp_path / "wide", strategy="fsdp", compute_dtype="float32")
    assert fsdp_memory(exact, model, is_gpu=True).microbatch.backward == 8 * 2**28 + gradient


def test_few_logits_are_kept_as_the_trainer_keeps_them(tmp_path: Path) -> None:
    assert list(activations._KEPT_ENTRIES.values()) == list(logprobs._KEPT_ENTRIES.values())
    assert list(activations._ENTRIES_AT_ONCE.values()) == list(logprobs._ENTRIES_PER_CHUNK.values())
    path, needed = write(tmp_path / "wide", DENSE | {"vocab_size": 2**17}), []
    for tokens in (6144, 6145):  # 768 Mi logits are those of 6144 tokens
        settings = {"strategy": "fsdp", "max_tokens_per_microbatch": tokens}
        needed.append(fsdp_memory(*make(path, **settings), is_gpu=True).microbatch.backward)
    weight = 2**17 * 64
    assert needed == [4 * 6144 * 2**17 + 2 * weight, 4 * 2**28 + 4 * weight]


def test_the_tokens_of_a_teacher_take_memory_in_the_backward_pass(dense: Path) -> None:
    distill, teacher = {"coef": 1, "top_k": 1024}, {"teacher": {"model": str(dense)}}
    config, model = make(dense, strategy="fsdp", loss={"distill": distill}, distilled=teacher)
    plain = fsdp_memory(*make(dense, strategy="fsdp"), is_gpu=True).microbatch
    more = fsdp_memory(config, model, is_gpu=True).microbatch
    assert more.forward == plain.forward
    logits = more.backward - 100 * 1024 * config.trainer.max_tokens_per_microbatch
    assert 0 < logits <= plain.backward  # which is the most of a layer and of the logits


RECORDED = sorted((ROOT / "benchmarks" / "results").glob("train-*.json"))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_estimates_are_those_that_gpus_measured(file: Path) -> None:
    """Tests that every estimate is within 5 % of the peak and idle memory that benchmarks.train recorded on H200s."""
    result = json.loads(file.read_text())
    for name, case in result["settings"]["cases"].items():
        kind, shape = result["settings"]["models"][case["model"]]
        kl_coef = 0.001 if case["has_reference"] else 0.0
        # The micro-batches of a mini-batch have about the same size, which is below the budget.
        num_tokens = int(result["medians"][f"{name}: tokens of a micro-batch"])
        settings = {"num_ranks": case["world"], "max_tokens_per_microbatch": num_tokens, "num_minibatches": 2}
        trainer = settings | {"strategy": case["strategy"], "loss": {"kl_coef": kl_coef}} | case["trainer"]
        config, _ = make(None, **trainer)
        model = make_architecture({"model_type": kind, **shape}, name)
        estimate, measured = first_rank(config, model, is_gpu=True), result["medians"]
        assert estimate.peak == pytest.approx(1e9 * measured[f"{name}: peak allocated [GB]"], rel=0.05), name
        assert estimate.idle == pytest.approx(1e9 * measured[f"{name}: idle [GB]"], rel=0.05), name
