"""Norms that Megatron's layers do not have: of the outputs of attention and of the feed-forward network, and of the
queries and keys of all heads together (OLMo 2, arXiv 2501.00656)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from services.common.families.architecture import Architecture
from services.trainer.compat.megatron.state import group_of
from services.trainer.megatron.experts import Offsets

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
        is_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
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
    assert spec.layer_specs is not None
    layers = []
    for layer in spec.layer_specs:
        changes: dict[str, Any] = {}
        parts: Any = layer.submodules
        if model.family.norms_outputs:
            add = ModuleSpec(module=NormedResidual, params={"config": config, "norm": norm})
            changes |= {"input_layernorm": IdentityOp, "pre_mlp_layernorm": IdentityOp}
            changes |= {"self_attn_bda": add, "mlp_bda": add}
        if model.norms_all_heads:
            heads = {"q_layernorm": model.num_attention_heads, "k_layernorm": model.num_key_value_heads}
            norms = {name: ModuleSpec(AllHeadsNorm, params={"num_heads": number}) for name, number in heads.items()}
            attention = parts.self_attention
            changes["self_attention"] = replace(attention, submodules=replace(attention.submodules, **norms))
        layers.append(replace(layer, submodules=replace(parts, **changes)))
    return replace(spec, layer_specs=layers)
