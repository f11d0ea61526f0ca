"""Settings of Megatron-Core: parallel sizes, memory, experts, and the tables that pass through to its dataclasses."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict


class MoeConfig(Strict):
    """Mixture-of-experts layers; without effect on a dense model."""

    grouped_gemm: bool = True
    """One kernel for all local experts (GPU only; on CPU experts run one after the other)."""
    token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """How tokens reach the ranks of their experts."""
    load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = "none"
    """Auxiliary loss that balances the experts; works together with aux_loss_coeff."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the auxiliary loss; 0 turns it off."""
    router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Precision of the router's scores; null is the model's."""
    router_score_function: Literal["softmax"] | None = None
    """null is the model's; any other than the model's would train another function than the engine samples from."""
    router_enable_expert_bias: Literal[False] | None = None
    """A bias per expert (arXiv 2408.15664); no model family here has one, so the engine could not be given it."""
    freeze_router: bool = False
    """The router's weights are not trained."""

    @model_validator(mode="after")
    def _balancing_is_whole(self) -> Self:
        if (self.load_balancing_type in ("none", "sinkhorn")) != (self.aux_loss_coeff == 0):
            raise ValueError(
                f"load_balancing_type {self.load_balancing_type} with aux_loss_coeff {self.aux_loss_coeff:g} does "
                "nothing that was asked for: set both, or neither"
            )
        return self


class MegatronConfig(Strict):
    """Megatron-Core (arXiv 1909.08053, 2104.04473). num_ranks = TP x PP x CP x DP; DP follows from the others."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """TP: ranks that share each matrix."""
    sequence_parallel: bool | None = None
    """Shard the activations between the matrices over the TP ranks too; null is on when TP > 1."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """PP: stages that the layers are cut into."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """VPP: chunks of layers per stage, interleaved, for a smaller pipeline bubble; micro-batches get equal sizes."""
    context_parallel_size: int = Field(default=1, ge=1)
    """CP: ranks that share each sequence."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """EP: ranks that share the experts of a layer; spans TP, CP and DP ranks."""
    expert_tensor_parallel_size: int | None = Field(default=None, ge=1)
    """ETP: ranks that share each expert's matrices; null is TP."""
    packed_sequences: bool = True
    """Sequences lie end to end without padding (THD); false pads a micro-batch to its longest (needs no THD kernel)."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks (ZeRO-1, arXiv 1910.02054)."""
    param_offload: bool = False
    """Weights are in host memory except while something computes or sends them."""
    grad_offload: bool = False
    """Gradient buffers take device memory only during an update."""
    optimizer_offload: bool = False
    """Optimizer state and float32 weights are in host memory except during the optimizer's step."""
    auto_offload: bool = False
    """All three of the above: each phase holds on the device just what it needs."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """What trainer.gradient_checkpointing recomputes: whole layers, or recompute_modules of each."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Full recompute: groups of recompute_num_layers layers, or just the first recompute_num_layers of a stage."""
    recompute_num_layers: int = Field(default=1, ge=1)
    """See recompute_method."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Selective recompute: parts of each layer, as Megatron names them."""
    empty_cuda_cache: bool = False
    """Give unused cached memory back between backward and the optimizer's step, for others on the same GPU."""
    moe: MoeConfig = MoeConfig()
    """Experts."""
    dist_checkpointing_path: str = ""
    """Start from this converted checkpoint (torch_dist) instead of the model directory's safetensors."""
    fully_reshardable: bool = True
    """Checkpoints load under any other parallel sizes; false is faster to save, and only DP may change. If false, a
    precision-aware optimizer keeps of its float32 weights only what bfloat16 lacks."""
    async_save: bool = False
    """Copy a checkpoint to host memory and go on training while it is written."""
    ddp_config: dict[str, Any] = Field(default_factory=dict)
    """Passed to megatron.core.distributed.DistributedDataParallelConfig; each key is checked."""
    optimizer_config_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to megatron.core.optimizer.OptimizerConfig; each key is checked."""
    transformer_config_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to megatron.core.transformer.TransformerConfig, over everything else; each key is checked."""

    @property
    def etp(self) -> int:
        """Expert tensor parallel size, resolved."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def has_sequence_parallel(self) -> bool:
        """sequence_parallel, resolved."""
        return self.tensor_model_parallel_size > 1 and self.sequence_parallel is not False

    @property
    def offloads(self) -> frozenset[str]:
        """Which of params, grads and optimizer leave the device between phases."""
        keys = {"params": self.param_offload, "grads": self.grad_offload, "optimizer": self.optimizer_offload}
        return frozenset(name for name, is_on in keys.items() if is_on or self.auto_offload)
