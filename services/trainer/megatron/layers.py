"""Parts of layers that Megatron does not have: norms of the outputs of attention and of the feed-forward network, and
of the queries and keys of all heads together (OLMo 2, arXiv 2501.00656), sinks and windows in packed attention, and
rotary scaling in only the layers without a window."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from services.common.families.architecture import Architecture
from services.trainer.attention import Attention, attend
from services.trainer.compat.megatron.state import group_of
from services.trainer.megatron.experts import Offsets, with_parts

_Add = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


class NormedResidual(MegatronModule):
    """Adds the norm of an output to the residual, in place of Megatron's sum of bias, dropout and residual."""

    def __init__(self, config: TransformerConfig, norm: Callable[..., torch.nn.Module]):
        super().__init__(config=config)
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, is_training: bool, is_fused: bool) -> _Add:
        return self._add

    def _add(
        self, output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        values, bias = output
        assert bias is None and not dropout, "no family with these norms has biases there, and no model has dropout"
        return residual + self.norm(values)


class AllHeadsNorm(MegatronModule):
    """Computes the root mean square norm of all heads together, of which a tensor-parallel rank has a part."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int):
        super().__init__(config=config)
        self._group = group_of(parallel_state.get_tensor_model_parallel_group())
        self._eps, self._size = eps, num_heads * hidden_size
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own = torch.ones(self._size // self._group.size(), dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(own)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Maps [s, b, heads of this rank, head_dim] to the same shape."""
        y = heads.flatten(-2).float()
        squares = y.pow(2).sum(-1, keepdim=True)
        # The sum over all ranks; the gradient of each rank's part is a sum over all ranks too.
        squares = mappings.reduce_from_tensor_model_parallel_region(squares, group=self._group)
        squares = mappings.copy_to_tensor_model_parallel_region(squares, group=self._group)
        y = self.weight.float() * y * torch.rsqrt(squares / self._size + self._eps)
        return y.to(heads.dtype).view_as(heads)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        assert metadata is not None
        groups = {"tp_group": self._group, "dp_cp_group": metadata["dp_cp_group"]}
        own = {"weight": self.weight}
        return make_sharded_tensors_for_checkpoint(own, prefix, {"weight": 0}, sharded_offsets, **groups)


def with_own_norms(
    spec: TransformerBlockSubmodules,
    config: TransformerConfig,
    model: Architecture,
    norm: Callable[..., torch.nn.Module],
) -> TransformerBlockSubmodules:
    """Returns the spec with the norms of the model's family; its norms must be separate layers, of class `norm`."""

    def normed(parts: Any) -> dict[str, object]:
        changes: dict[str, object] = {}
        if model.family.norms_outputs:
            add = ModuleSpec(module=NormedResidual, params={"config": config, "norm": norm})
            changes |= {"input_layernorm": IdentityOp, "pre_mlp_layernorm": IdentityOp}
            changes |= {"self_attn_bda": add, "mlp_bda": add}
        if model.norms_all_heads:
            heads = {"q_layernorm": model.num_attention_heads, "k_layernorm": model.num_key_value_heads}
            norms = {name: ModuleSpec(AllHeadsNorm, params={"num_heads": number}) for name, number in heads.items()}
            attention = parts.self_attention
            changes["self_attention"] = replace(attention, submodules=replace(attention.submodules, **norms))
        return changes

    return with_parts(spec, normed)


class SinkAttention(DotProductAttention):
    """Computes causal self-attention, with a sink for each head if the model has sinks (gpt-oss, arXiv 2508.10925), and
    with a window in the layers that have one, with the arguments of TransformerEngine's.

    Reason: TransformerEngine's choice of kernels turns all off for sinks in packed sequences (read, not tried), and
    Megatron's own attention, which has the sinks, the windows and their checkpoint, takes no packed sequences.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.softmax_offset is not None:
            assert isinstance(self.softmax_offset, torch.nn.Parameter), "sinks are learned or there are none"
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        window = self.scale_mask_softmax.window_size  # keys before the query's own, and after it
        self._window = None if window is None else window[0] + 1

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Maps [s, b, heads, dim] to [s, b, heads * dim], or packed [t, heads, dim] to [t, heads * dim]."""
        assert attention_mask is None, "attention is causal and takes no mask"
        attention = Attention(self.softmax_scale, self._window, self.softmax_offset, softcap=None)
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            return attend(query, key, value, lengths, attention).flatten(1)
        length, size = query.shape[:2]
        bounds = torch.arange(0, length * size + 1, length, dtype=torch.int32, device=query.device)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = attend(query, key, value, (bounds, length), attention)
        return out.unflatten(0, (size, length)).transpose(0, 1).flatten(2)


class UnscaledInWindows(SelfAttention):
    """Leaves the model's rotary scaling out in layers with a window (OLMo 3, arXiv 2512.13961)."""

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, *args: Any, **kwargs: Any):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self._unscaled = None
        every = config.window_attn_skip_freq
        if every is not None and is_layer_window_attention(config.window_size, every, layer_number):
            self.config = copy.copy(config)
            vars(self.config).pop("yarn_rotary_scaling_factor", None)  # by which Megatron scales cosine and sine
            base, is_cpu = vars(config)["window_rotary_base"], bool(config.use_cpu_initialization)
            size = self.hidden_size_per_attention_head
            self._unscaled = RotaryEmbedding(size, 1.0, rotary_base=base, use_cpu_initialization=is_cpu)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._unscaled is not None:
            is_packed = kwargs.get("packed_seq_params") is not None
            rotary_pos_emb = self._unscaled(rotary_pos_emb.size(0), packed_seq=is_packed)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def with_own_attention(spec: TransformerBlockSubmodules, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Returns a spec whose layers have SinkAttention and, if windows have a rotary embedding of their own,
    UnscaledInWindows."""

    def attending(parts: Any) -> dict[str, object]:
        attention = parts.self_attention
        own = replace(attention, submodules=replace(attention.submodules, core_attention=SinkAttention))
        own = replace(own, module=UnscaledInWindows) if hasattr(config, "window_rotary_base") else own
        return {"self_attention": own}

    return with_parts(spec, attending)
