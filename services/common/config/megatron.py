"""Defines the settings of Megatron-Core: parallelism, memory, experts, and options passed to its dataclasses, with the
rules for those that Lockstep sets itself.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from services.common.config.base import Strict, Table


class MoeConfig(Strict):
    """Mixture-of-experts layers; no effect on a dense model."""

    grouped_gemm: bool = True
    """Compute all experts of a rank together, with one grouped matrix product. False computes one after the other,
    and is slower."""
    token_dispatcher_type: Literal["auto", "allgather", "alltoall", "flex"] = "auto"
    """How tokens reach the ranks of their experts. allgather: every rank gets the tokens of all EP ranks once, and
    micro-batches are padded to the same size on all of them; alltoall: a rank gets a copy of a token for each of its
    experts; flex: Megatron's flex dispatcher. auto is allgather if EP is below the number of experts of a token, where
    it sends less, and alltoall otherwise or if the other settings do not allow allgather."""
    load_balancing_type: Literal["none", "aux_loss", "global_aux_loss", "sinkhorn"] = "none"
    """Load balancing of the experts. The two auxiliary losses, over a micro-batch and over all ranks' micro-batches so
    far, need aux_loss_coeff above 0, none and sinkhorn need 0."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the auxiliary loss; 0 turns it off."""
    router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Data type of the router's scores; null uses the model's."""
    router_score_function: Literal["softmax", "sigmoid"] | None = None
    """Score function of the router; null uses the model's. It must be the model's, because the engine uses that one."""
    router_enable_expert_bias: bool | None = None
    """Bias per expert (arXiv 2408.15664); null is the model's. It must be the model's, and is never updated, because
    the engine has the published one."""
    freeze_router: bool = False
    """Keep the router's weights fixed."""

    def check_rules(self) -> None:
        if (self.load_balancing_type in ("none", "sinkhorn")) != (self.aux_loss_coeff == 0):
            raise ValueError(
                f"load_balancing_type {self.load_balancing_type} does not go with aux_loss_coeff "
                f"{self.aux_loss_coeff:g}: the auxiliary losses need a coefficient above 0, none and sinkhorn need 0"
            )


class MegatronConfig(Strict):
    """Megatron-Core (arXiv 1909.08053, 2104.04473). num_ranks = TP x PP x CP x DP; DP is what remains."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Tensor-parallel size (TP): number of ranks that each weight matrix is split over."""
    sequence_parallel: bool | None = None
    """Sequence parallelism: also shard the activations between the split matrices over the TP ranks; null turns it on
    if TP > 1."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Pipeline-parallel size (PP): number of stages that the layers are split into."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Virtual pipeline size (VPP): number of interleaved chunks of layers per stage, for a smaller pipeline bubble.
    Micro-batches are then padded to one size. null turns interleaving off."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Context-parallel size (CP): number of ranks that each sequence is split over."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Expert-parallel size (EP): number of ranks that the experts of a layer are split over, taken from the TP, CP and
    DP ranks."""
    expert_tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Expert tensor-parallel size (ETP): number of ranks that each expert's matrices are split over; null is TP."""
    packed_sequences: bool = True
    """Pack sequences end to end without padding (THD). false pads all sequences of a micro-batch to the longest, which
    needs no THD kernel."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks (ZeRO-1, arXiv 1910.02054)."""
    param_offload: bool = False
    """Offload weights to host memory except while they are used to compute or are being published."""
    grad_offload: bool = False
    """Free the gradient buffers on the device except during an update."""
    optimizer_offload: bool = False
    """Offload optimizer state and float32 weights to host memory except during the optimizer step."""
    auto_offload: bool = False
    """Turn on param_offload, grad_offload and optimizer_offload, so that each phase keeps only what it needs on the
    device."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """What trainer.gradient_checkpointing recomputes. full: whole layers; selective: only recompute_modules of each
    layer."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which layers full recompute covers. uniform: all, in groups of recompute_num_layers; block: only the first
    recompute_num_layers of each pipeline stage."""
    recompute_num_layers: int = Field(default=1, ge=1)
    """Number of layers that recompute_method applies to."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Modules of each layer that selective recompute covers, by their Megatron names."""
    empty_cuda_cache: bool = False
    """Release cached but unused GPU memory before the optimizer step, for other processes on the same GPU."""
    fp8: Literal["none", "tensorwise", "blockwise"] = "none"
    """Compute the matrix products of linear layers in float8, with TransformerEngine on GPUs of compute capability 8.9
    or above (blockwise: 9.0). tensorwise: a scale for each tensor, e4m3 forward and e5m2 backward; blockwise: a scale
    for each 128 numbers of an activation and 128 x 128 of a weight, e4m3 (arXiv 2412.19437). Scales are those of the
    current values, so there is no history to save. Embedding, output layer, attention, norms, gradients, master weights
    and published weights do not change. Micro-batches are padded to a multiple of 128 tokens on each rank. Not with
    LoRA, nor for models with experts."""
    moe: MoeConfig = MoeConfig()
    """Mixture-of-experts layers."""
    use_mbridge: bool = False
    """Build the model and convert its weights with the package mbridge (the extra of this name) instead of Lockstep's
    own records of model families, for the types that docs/megatron.md lists. When the run opens, a small model of the
    same config must have the log-probabilities of transformers, or it is refused. Not for a critic, nor with LoRA."""
    dist_checkpointing_path: str = ""
    """Path of a converted Megatron checkpoint (torch_dist) to load instead of the model directory's safetensors; empty
    loads the safetensors."""
    fully_reshardable: bool = True
    """Save checkpoints that can be loaded with any other parallel sizes. false saves faster, but only DP may change
    when resuming, and a precision-aware optimizer then saves only the bits of its float32 weights that bfloat16
    lacks."""
    async_save: bool = False
    """Copy a checkpoint to host memory and continue training while it is written to disk."""
    ddp_config: Table = Field(default_factory=dict)
    """Arguments for megatron.core.distributed.DistributedDataParallelConfig; an unknown key is an error."""
    optimizer_config_kwargs: Table = Field(default_factory=dict)
    """Arguments for megatron.core.optimizer.OptimizerConfig; an unknown key is an error."""
    transformer_config_kwargs: Table = Field(default_factory=dict)
    """Arguments for megatron.core.transformer.TransformerConfig, which override all other settings; an unknown key is
    an error."""

    def check_rules(self) -> None:
        if self.use_mbridge and self.dist_checkpointing_path:
            raise ValueError(
                "use_mbridge reads the safetensors of the model directory, and dist_checkpointing_path is set: leave "
                "one of the two out"
            )
        if self.use_mbridge and self.fp8 != "none":
            raise ValueError(
                f"fp8 {self.fp8} with use_mbridge: the small model that proves mbridge's conversion must compute as "
                "transformers does; leave one of the two out"
            )

    @property
    def rows_multiple(self) -> int:
        """The number that each rank's tokens of a micro-batch must be a multiple of: float8's kernels need it."""
        return 1 if self.fp8 == "none" else 128

    @property
    def etp(self) -> int:
        """The expert tensor-parallel size with null resolved."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def has_sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on, with null resolved."""
        return self.tensor_model_parallel_size > 1 and self.sequence_parallel is not False

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the router of experts has a loss of its own."""
        return bool(self.moe.aux_loss_coeff or self.transformer_config_kwargs.get("moe_z_loss_coeff"))

    @property
    def offloads(self) -> frozenset[str]:
        """Which of params, grads and optimizer leave the device between phases."""
        keys = {"params": self.param_offload, "grads": self.grad_offload, "optimizer": self.optimizer_offload}
        return frozenset(name for name, is_on in keys.items() if is_on or self.auto_offload)


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
        **dict.fromkeys(("mtp_num_layers", "qk_clip"), "nothing: Lockstep does not do it"),
        **dict.fromkeys(("batch_p2p_comm", "overlap_p2p_comm"), _ITSELF),
        **dict.fromkeys(("calculate_per_token_loss", "variable_seq_lengths", "finalize_model_grads_func"), _ITSELF),
        **dict.fromkeys(("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"), _ITSELF),
    },
    "optimizer_config_kwargs": {
        "lr": f"{_OPTIM}.lr",
        **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), f"{_OPTIM}.lr, which is the rate of all weights"),
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
    "ddp_config": {
        "use_distributed_optimizer": f"{_MEGATRON}.use_distributed_optimizer",
        "use_megatron_fsdp": "trainer.strategy fsdp",
    },
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
