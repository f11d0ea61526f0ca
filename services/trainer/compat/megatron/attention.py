"""Cuts sequences for context parallelism, and implements norm and attention for CPU, without TransformerEngine.

Reason: in Megatron's local layer spec the norm does not support sequence parallelism, the attention
supports neither packed sequences nor context parallelism, and latent attention cuts its projections to latents, after
which the key's rotated part would get the gradient of only this rank's heads. Seen with Megatron-Core 0.16.1.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm


def zigzag(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Returns the positions, int64 [length / cp_size], of a sequence's tokens on `cp_rank`.

    Reason: Megatron's rotary embedding of packed sequences (rope_utils.py) and TransformerEngine's attention expect
    this layout, and Megatron's own function for it (utils.get_batch_on_this_cp_rank) does not support packed sequences.
    Seen with TransformerEngine 2.12.0 too.
    """
    if cp_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).view(2 * cp_size, -1)
    return torch.cat([chunks[cp_rank], chunks[-1 - cp_rank]])


def with_torch_modules(spec: Any) -> Any:
    """Returns a layer or block spec with the local norm and attention replaced by those of this module."""
    if isinstance(spec, type):
        return {WrappedTorchNorm: RMSNorm, DotProductAttention: SDPAttention}.get(spec, spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)(with_torch_modules(part) for part in spec)
    if isinstance(spec, functools.partial):
        kwargs = {name: with_torch_modules(value) for name, value in spec.keywords.items()}
        return functools.partial(with_torch_modules(spec.func), *map(with_torch_modules, spec.args), **kwargs)
    if isinstance(spec, multi_latent_attention.MLASelfAttentionSubmodules):
        # Makes it take a class that it does not know, in place of ModelOpt's, which no spec here has. TELinear stays
        # where there is one: such a process makes TransformerEngine's layers, too.
        multi_latent_attention.Linear = DuplicatedLinear  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(multi_latent_attention.TELinear, type):  # a mock, with which isinstance fails
            multi_latent_attention.TELinear = DuplicatedLinear  # pyright: ignore[reportAttributeAccessIssue]
        whole = dict.fromkeys(("linear_q_down_proj", "linear_kv_down_proj"), DuplicatedLinear)
        spec = dataclasses.replace(spec, **whole)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = [field.name for field in dataclasses.fields(spec) if field.init]
        return dataclasses.replace(spec, **{name: with_torch_modules(getattr(spec, name)) for name in fields})
    return spec


class RMSNorm(torch.nn.Module):
    """Computes the root mean square norm (arXiv 1910.07467) of the last dimension in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # If Megatron finds this attribute, finalize_model_grads sums the gradient over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class DuplicatedLinear(MegatronModule):
    """Multiplies this rank's tokens with a weight that all tensor-parallel ranks hold, with TELinear's arguments."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], torch.Tensor],
        **kwargs: object,
    ):
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


class SDPAttention(MegatronModule):
    """Computes causal self-attention, with the arguments of TransformerEngine's.

    Each packed sequence takes one call of torch's attention. With context parallelism a rank keeps the queries of its
    two zigzag chunks of each sequence, gathers all keys and values, and masks by position (arXiv 2407.21783, section
    3.3.2).
    """

    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: object,
    ):
        super().__init__(config=config)
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise NotImplementedError("attention on CPU supports only the vanilla softmax over the whole context")
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise NotImplementedError(f"attention on CPU does not support {attn_mask_type}")
        if config.attention_dropout if attention_dropout is None else attention_dropout:
            raise NotImplementedError("attention on CPU does not support dropout")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self._cp_group = groups.cp
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Maps [s, b, heads, dim] to [s, b, heads * dim], or packed [t, heads, dim] to [t, heads * dim]."""
        if attention_mask is not None:
            raise NotImplementedError("attention on CPU is causal and takes no mask")
        cp = self._cp_group.size()
        lengths = [query.size(0) * cp]
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if cp > 1:  # gathers the rows of all ranks in rank order; the backward is a reduce-scatter
            key, value = (gather_from_sequence_parallel_region(x, group=self._cp_group) for x in (key, value))
        out, start = [], 0
        for length in lengths:
            out.append(self._attend(query, key, value, start, length))
            start += length // cp
        mixed = torch.cat(out).flatten(2)
        return mixed if packed_seq_params is None else mixed.squeeze(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, length: int
    ) -> torch.Tensor:
        """Attends within one sequence of `length` tokens; this rank's rows of it begin at row `start`."""
        cp, rank, num_rows = self._cp_group.size(), self._cp_group.rank(), query.size(0)
        end = start + length // cp
        if cp > 1:
            key = torch.cat([key[r * num_rows + start : r * num_rows + end] for r in range(cp)])
            value = torch.cat([value[r * num_rows + start : r * num_rows + end] for r in range(cp)])
            key_positions = torch.cat([zigzag(length, cp, r) for r in range(cp)])
            mask = zigzag(length, cp, rank)[:, None] >= key_positions[None, :]
        else:
            key, value, mask = key[start:end], value[start:end], None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query[start:end], key, value))
        is_grouped = q.size(1) != k.size(1)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=is_grouped
        )
        return mixed.permute(2, 0, 1, 3)
