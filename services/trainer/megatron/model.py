"""Builds a model as Megatron chunks: one per rank, or several with an interleaved pipeline."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from transformers import PretrainedConfig

from services.common.config.layout import gathers_tokens
from services.common.config.megatron import MegatronConfig
from services.common.families.architecture import Architecture
from services.trainer.compat.megatron.attention import RMSNorm, with_torch_modules
from services.trainer.compat.megatron.model import (
    HiddenStateModel,
    add_gradients_in_place,
    add_router_biases,
    set_latent_eps,
    use_faster_dispatchers,
)
from services.trainer.compat.megatron.state import group_of
from services.trainer.compat.torch import set_class
from services.trainer.megatron.experts import require_groupable, with_grouped_experts, with_parts
from services.trainer.megatron.layers import with_own_attention, with_own_norms
from services.trainer.megatron.microbatch import MicrobatchShard
from services.trainer.megatron.settings import make, model_settings, refusals
from services.trainer.updates.logprobs import linear_logprobs


class LogprobHead(ColumnParallelLinear):
    """Computes log-probabilities and entropies from hidden states, without whole logits. It is the output layer."""

    def forward(  # type: ignore[override]
        self, hidden_SBD: torch.Tensor, weight_VD: torch.Tensor, shard: MicrobatchShard, temperature: float
    ) -> torch.Tensor:
        """Returns float32 [R, M] for the predictions on this context-parallel rank (updates/logprobs.py)."""
        if self.sequence_parallel:
            hidden_SBD = mappings.gather_from_sequence_parallel_region(hidden_SBD, group=self.tp_group)
        else:
            hidden_SBD = mappings.copy_to_tensor_model_parallel_region(hidden_SBD, group=self.tp_group)
        hidden_MD = hidden_SBD.flatten(0, 1)[shard.rows_M]
        group = group_of(self.tp_group)
        shared = group if group.size() > 1 else None
        return linear_logprobs(hidden_MD, weight_VD, shard.targets, temperature, shared)


class ValueHead(torch.nn.Module):
    """Computes a value from each hidden state, equal on all tensor-parallel ranks; 0 before any training."""

    def __init__(self, layer: ColumnParallelLinear):
        super().__init__()
        assert layer.weight is not None  # only a tied output layer has no weight
        self.sequence_parallel, self.tp_group = layer.sequence_parallel, layer.tp_group
        self.weight = torch.nn.Parameter(torch.zeros_like(layer.weight[:1]))

    def forward(self, hidden_SBD: torch.Tensor, shard: MicrobatchShard) -> torch.Tensor:
        """Returns float32 [1, M], the values on this context-parallel rank."""
        if self.sequence_parallel:
            # All ranks compute the same value from the whole, so each keeps its part of the gradient and sums nothing.
            hidden_SBD = mappings.gather_from_sequence_parallel_region(
                hidden_SBD, tensor_parallel_output_grad=False, group=self.tp_group
            )
        hidden_MD = hidden_SBD.flatten(0, 1)[shard.rows_M]
        return (hidden_MD.float() @ self.weight.float().T).T


class Chunk(HiddenStateModel):
    """Computes a chunk of a model; the last chunk returns outputs at the predictions."""

    num_outputs: int
    """Those of every model of this kind; a micro-batch may ask a language model for more (updates/logprobs.py)."""

    def forward(self, shard: MicrobatchShard, temperature: float) -> torch.Tensor:  # type: ignore[override]
        """Returns hidden states for the next chunk; the last chunk returns its head's outputs [K, M]."""
        # Megatron's annotations leave out that positions, mask and packing may be None.
        hidden = super().forward(shard.tokens, None, None, packed_seq_params=shard.packed)  # pyright: ignore[reportArgumentType]
        return self._outputs(hidden, shard, temperature) if self.post_process else hidden

    def layers(self) -> Iterator[TransformerLayer]:
        for layer in self.decoder.layers:
            assert isinstance(layer, TransformerLayer)
            yield layer

    def _outputs(self, hidden_SBD: torch.Tensor, shard: MicrobatchShard, temperature: float) -> torch.Tensor:
        """Returns the head's outputs [K, M]."""
        raise NotImplementedError


class LogprobModel(Chunk):
    """Returns log-probabilities and entropies."""

    num_outputs = 2

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._set_head()

    @classmethod
    def of(cls, model: GPTModel) -> "LogprobModel":
        """Turns a model that another library has built into a LogprobModel."""
        set_class(model, cls)
        assert isinstance(model, cls)
        model._set_head()
        return model

    def _set_head(self) -> None:
        if self.post_process:
            set_class(self.output_layer, LogprobHead)

    def _outputs(self, hidden_SBD: torch.Tensor, shard: MicrobatchShard, temperature: float) -> torch.Tensor:
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return self.output_layer(hidden_SBD, weight, shard, temperature)


class ValueModel(Chunk):
    """Returns values. The checkpoint that the model starts from has no tensor for its head."""

    num_outputs = 1

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            assert isinstance(self.output_layer, ColumnParallelLinear)
            self.output_layer = ValueHead(self.output_layer)

    def _outputs(self, hidden_SBD: torch.Tensor, shard: MicrobatchShard, temperature: float) -> torch.Tensor:
        return self.output_layer(hidden_SBD, shard)


# Takes a layer spec, whether the chunk has the embedding and the output layer, and its stage with VPP.
MakeChunk = Callable[[TransformerBlockSubmodules, tuple[bool, bool], int | None], Chunk]


def maker(kind: type[Chunk], config: TransformerConfig, hf: PretrainedConfig) -> MakeChunk:
    """Returns what makes a chunk of `kind`."""

    def make_chunk(spec: TransformerBlockSubmodules, ends: tuple[bool, bool], stage: int | None) -> Chunk:
        return kind(
            config=config,
            # Megatron's annotation leaves out specs of several layers.
            transformer_layer_spec=spec,  # pyright: ignore[reportArgumentType]
            pre_process=ends[0],
            post_process=ends[1],
            **model_settings(hf),
            vp_stage=stage,
        )

    return make_chunk


def build_chunks(
    make_chunk: MakeChunk,
    config: TransformerConfig,
    megatron: MegatronConfig,
    model: Architecture,
    *,
    is_adapted: bool = False,
    is_gpu: bool = False,
) -> list[Chunk]:
    """Makes this rank's chunks on the current device; their weights are not loaded yet.

    With `is_gpu` they have TransformerEngine's layers. With `is_adapted` the norms are separate layers, since the
    adapter needs the normalized input, which a fused layer does not return.
    """
    is_grouped = megatron.moe.grouped_gemm and config.num_moe_experts is not None
    if is_grouped:
        require_groupable(config)
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    for index in range(vpp or 1):
        stage = index if vpp else None
        spec = _layer_spec(config, stage, model, is_adapted=is_adapted, is_gpu=is_gpu)
        if model.family.has_windows:
            spec = with_own_attention(spec, config)
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunk = make_chunk(with_grouped_experts(spec, model) if is_grouped else spec, (is_first, is_last), stage)
        chunk.model_type = ModelType.encoder_or_decoder
        set_latent_eps(chunk)
        add_router_biases(chunk)
        if is_grouped:
            use_faster_dispatchers(chunk, gathers=gathers_tokens(megatron, config.moe_router_topk))
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return chunks


def wrap_chunks(
    chunks: Sequence[Chunk], config: TransformerConfig, megatron: MegatronConfig
) -> list[DistributedDataParallel]:
    """Wraps chunks to sum their gradients over the data-parallel ranks."""
    # On CPU, communication in the background would compete with computation for the cores.
    overlaps = megatron.ddp_config.get("overlap_grad_reduce", next(chunks[0].parameters()).is_cuda)
    settings = {
        "use_distributed_optimizer": megatron.use_distributed_optimizer,
        "grad_reduce_in_fp32": True,
        # Sums, because the loss is divided by global counts; Megatron refuses averages with calculate_per_token_loss.
        "average_in_collective": False,
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps and megatron.use_distributed_optimizer,
    }
    ddp = make(DistributedDataParallelConfig, settings, megatron.ddp_config, "megatron.ddp_config")
    with refusals("megatron.ddp_config"):
        wrapped = [
            # As Megatron's own training does: what later chunks communicate overlaps with computation anyway.
            DistributedDataParallel(config, ddp, half_precision(chunk, config), disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        # Megatron's annotation leaves out the list that an interleaved schedule takes.
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]  # pyright: ignore[reportAttributeAccessIssue]
    add_gradients_in_place(wrapped)
    return wrapped


def half_precision(chunk: Chunk, config: TransformerConfig) -> torch.nn.Module:
    """Returns the chunk, wrapped to convert between float32 and bfloat16 if it computes in bfloat16.

    The routers' biases stay in float32.
    """
    if not config.bf16:
        return chunk
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    biases = [router.expert_bias for router in routers]
    wrapped = Float16Module(config, chunk)
    for router, bias in zip(routers, biases, strict=True):
        router.expert_bias = bias
    return wrapped


def unwrap(chunk: torch.nn.Module) -> Chunk:
    """Returns the model chunk inside its wrappers."""
    while not isinstance(chunk, Chunk):
        chunk = chunk.get_submodule("module")
    return chunk


def _layer_spec(
    config: TransformerConfig, stage: int | None, model: Architecture, *, is_adapted: bool, is_gpu: bool
) -> TransformerBlockSubmodules:
    has_own_norms = model.family.norms_outputs or model.norms_all_heads
    if is_gpu:
        from megatron.core.extensions.transformer_engine import TENorm

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        is_latent = config.multi_latent_attention
        spec = _with_separate_norms(spec, is_latent=is_latent) if is_adapted or is_latent or has_own_norms else spec
        return with_own_norms(spec, config, model, TENorm) if has_own_norms else spec
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    spec = _with_expert_norms_apart(with_torch_modules(spec))
    return with_own_norms(spec, config, model, RMSNorm) if has_own_norms else spec


def _with_expert_norms_apart(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Gives the norm before experts the checkpoint name that it has with TransformerEngine, which never fuses it."""

    def without_shared_keys(parts: Any) -> dict[str, object]:
        names = dict(parts.sharded_state_dict_keys_map)
        if parts.mlp.module is MoELayer:
            names.pop("pre_mlp_layernorm.", None)  # latent attention has no names
        return {"sharded_state_dict_keys_map": names}

    return with_parts(spec, without_shared_keys)


def _with_separate_norms(spec: TransformerBlockSubmodules, *, is_latent: bool) -> TransformerBlockSubmodules:
    """Splits layers that fuse TransformerEngine's norm with a linear layer; checkpoint names are those on CPU."""
    from megatron.core.extensions import transformer_engine as te

    def separate(parts: Any) -> dict[str, object]:
        own: dict[str, type] = {"linear_qkv": te.TEColumnParallelLinear}
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        if is_latent:
            own = dict.fromkeys(("linear_q_up_proj", "linear_kv_up_proj"), te.TEColumnParallelLinear)
            own |= dict.fromkeys(("q_layernorm", "kv_layernorm"), te.TENorm)
            names = {}
        attention = replace(parts.self_attention.submodules, **own)
        changes = {"input_layernorm": te.TENorm, "self_attention": replace(parts.self_attention, submodules=attention)}
        if getattr(parts.mlp.submodules, "linear_fc1", None) is te.TELayerNormColumnParallelLinear:
            dense = replace(parts.mlp.submodules, linear_fc1=te.TEColumnParallelLinear)
            changes |= {"pre_mlp_layernorm": te.TENorm, "mlp": replace(parts.mlp, submodules=dense)}
            names |= {} if is_latent else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        return {"sharded_state_dict_keys_map": names, **changes}

    return with_parts(spec, separate)
