"""The options that pass through to Megatron-Core, and the rules for those that Lockstep sets itself."""

from collections.abc import Iterator

from services.common.config.megatron import MegatronConfig, MoeConfig

# Pairs of a key and its problem, in the order of the rules. A rule may assume that all earlier ones hold.
Problems = Iterator[tuple[str, str]]

_MEGATRON, _MOE, _OPTIM = "trainer.megatron", "trainer.megatron.moe", "trainer.optim"
_ITSELF = "nothing: Lockstep sets it itself"
_MODEL = "the model's config.json"
_OTHER_NAMES = ("load_balancing_type", "freeze_router")  # which Megatron calls otherwise, or does not have

_LATENT = (
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings"),
)
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")

# Megatron options that Lockstep sets from its own keys, by pass-through table, with the key to use instead.
RESERVED = {
    "transformer_config_kwargs": {
        **{
            key: f"{_MEGATRON}.{key}"
            for key in MegatronConfig.model_fields
            if key.endswith("_parallel_size") or key.startswith("recompute_") or key == "sequence_parallel"
        },
        **dict.fromkeys(("fp8", "fp8_recipe"), f"{_MEGATRON}.fp8"),
        "fp8_param": _ITSELF,
        **{f"moe_{key}": f"{_MOE}.{key}" for key in MoeConfig.model_fields if key not in _OTHER_NAMES},
        "moe_router_load_balancing_type": f"{_MOE}.load_balancing_type",
        **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype"), "trainer.compute_dtype"),
        **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels"), _MODEL),
        **dict.fromkeys(("num_attention_heads", "num_query_groups", "num_moe_experts", "moe_ffn_hidden_size"), _MODEL),
        **dict.fromkeys(("layernorm_epsilon", "normalization", "activation_func", "gated_linear_unit"), _MODEL),
        **dict.fromkeys(("qk_layernorm", "add_qkv_bias", "add_bias_linear", "attention_dropout"), _MODEL),
        **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"), _MODEL),
        **dict.fromkeys((*_LATENT, "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _MODEL),
        **dict.fromkeys(("softmax_type", "window_size", "window_attn_skip_freq"), _MODEL),
        "activation_func_clamp_value": _MODEL,
        "cache_mla_latents": _ITSELF,
        **dict.fromkeys(("hidden_dropout", "moe_router_topk", "moe_router_pre_softmax", "moe_layer_freq"), _MODEL),
        **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"), _MODEL),
        "moe_router_bias_update_rate": _ITSELF,
        **dict.fromkeys(("batch_p2p_comm", "overlap_p2p_comm"), _ITSELF),
        **dict.fromkeys(("calculate_per_token_loss", "variable_seq_lengths", "finalize_model_grads_func"), _ITSELF),
        **dict.fromkeys(("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"), _ITSELF),
    },
    "optimizer_config_kwargs": {
        "lr": f"{_OPTIM}.lr",
        "min_lr": f"{_OPTIM}.min_lr_ratio",
        "weight_decay": f"{_OPTIM}.weight_decay",
        "adam_beta1": f"{_OPTIM}.betas",
        "adam_beta2": f"{_OPTIM}.betas",
        "adam_eps": f"{_OPTIM}.eps",
        "clip_grad": f"{_OPTIM}.max_grad_norm",
        "use_distributed_optimizer": f"{_MEGATRON}.use_distributed_optimizer",
        "overlap_param_gather": f"{_MEGATRON}.ddp_config.overlap_param_gather",
        "store_param_remainders": f"{_MEGATRON}.fully_reshardable",
        "optimizer": _ITSELF,
        **dict.fromkeys(("bf16", "fp16", "params_dtype"), "trainer.compute_dtype"),
    },
    "ddp_config": {"use_distributed_optimizer": f"{_MEGATRON}.use_distributed_optimizer"},
}


def pass_through_problems(megatron: MegatronConfig) -> Problems:
    for table, reserved in RESERVED.items():
        for key in getattr(megatron, table):
            if key in reserved:
                yield f"{table}.{key}", f"is not for this table; use {reserved[key]}"
    dtype = str(megatron.optimizer_config_kwargs.get("main_grads_dtype", "fp32"))
    if dtype.lower() != "fp32" and megatron.ddp_config.get("grad_reduce_in_fp32", True):
        yield (
            "optimizer_config_kwargs.main_grads_dtype",
            f"{dtype} alone changes nothing, because Megatron-Core 0.16 keeps gradients in float32 unless "
            "ddp_config.grad_reduce_in_fp32 is false; set that too, or remove main_grads_dtype",
        )
    if megatron.optimizer_config_kwargs.get("optimizer_cpu_offload"):
        yield from _optimizer_on_cpu(megatron)


def _optimizer_on_cpu(megatron: MegatronConfig) -> Problems:
    key, options = "optimizer_config_kwargs.optimizer_cpu_offload", megatron.optimizer_config_kwargs
    if not options.get("optimizer_offload_fraction"):
        yield key, "true: set optimizer_offload_fraction too, the share of the weights that is updated in host memory"
    if not options.get("use_precision_aware_optimizer"):
        yield key, "true: Megatron has it in its precision-aware optimizer; set use_precision_aware_optimizer too"
    for other in ("use_distributed_optimizer", "fully_reshardable"):
        if not getattr(megatron, other):
            yield other, "False: optimizer_cpu_offload needs True"
    if "optimizer" in megatron.offloads:
        which = "auto_offload" if megatron.auto_offload else "optimizer_offload"
        yield which, "True: optimizer_cpu_offload has the state in host memory already; set one of the two"
