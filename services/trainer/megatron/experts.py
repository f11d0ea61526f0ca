"""Computes all experts of a layer with one grouped matrix product per matrix (torch.nn.functional.grouped_mm).

The experts on a rank share two parameters. TransformerEngine has a parameter for each expert, and the CPU's work for
thousands of them takes longer than the GPU's.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.jit import jit_fuser
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from services.common.errors import InvalidInput
from services.trainer.compat.torch import GROUPED_ALIGN_BYTES

# The place of a tensor in axes that are added in front: axis, index, number.
Offsets = tuple[tuple[int, int, int], ...]

_UNSUPPORTED = ("fp8", "fp4", "moe_apply_probs_on_input", "moe_latent_size", "use_te_activation_func")


class GroupedExperts(MegatronModule):
    """Computes the experts of one layer on this rank: E of them, with intermediate size F and hidden size H.

    `weight1` [E, 2F, H] stacks gate and up, `weight2` [E, H, F] is down. F is this rank's part with ETP; the dispatcher
    communicates.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        assert pg_collection is not None and config.moe_ffn_hidden_size is not None
        groups = pg_collection
        self._ep_group, self._etp_group, self._edp_group = groups.ep, groups.expt_tp, groups.expt_dp
        width = config.moe_ffn_hidden_size // self._etp_group.size()
        self.weight1 = self._parameter(num_local_experts, 2 * width, config.hidden_size, cut=1)
        self.weight2 = self._parameter(num_local_experts, config.hidden_size, width, cut=2)
        recomputed = config.recompute_modules or ()
        self._is_recomputed = config.recompute_granularity == "selective" and "moe_act" in recomputed

    def forward(
        self, tokens_TH: torch.Tensor, tokens_per_expert: torch.Tensor, probs_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Returns each token's output [T, H], times its probability. Tokens are sorted by expert."""
        ends_E = tokens_per_expert.to(tokens_TH.device, non_blocking=True).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(tokens_TH, self.weight1.transpose(1, 2), offs=ends_E)
        if not self._is_recomputed:
            activated = self._activate(hidden, probs_T)
            return F.grouped_mm(activated, self.weight2.transpose(1, 2), offs=ends_E), None
        checkpoint = tensor_parallel.CheckpointWithoutOutput()
        activated = checkpoint.checkpoint(self._activate, hidden, probs_T)
        out = F.grouped_mm(activated, self.weight2.transpose(1, 2), offs=ends_E)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Returns the weights under the names and shapes of Megatron's own experts."""
        return {
            f"{prefix}weight1": self._sharded(f"{prefix}experts.linear_fc1.weight", self.weight1, sharded_offsets, 1),
            f"{prefix}weight2": self._sharded(f"{prefix}experts.linear_fc2.weight", self.weight2, sharded_offsets, 2),
        }

    def expert_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields a view of each local expert's matrices, under TransformerEngine's names (`linear_fc1.weight3`)."""
        for layer, weight in (("linear_fc1", self.weight1), ("linear_fc2", self.weight2)):
            for expert, matrix in enumerate(weight.detach()):
                cut = 0 if layer == "linear_fc1" else 1
                tensor_parallel.set_tensor_model_parallel_attributes(matrix, True, cut, 1)
                yield f"{layer}.weight{expert}", matrix

    def _parameter(self, *shape: int, cut: int) -> torch.nn.Parameter:
        is_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        if self.config.perform_initialization:
            torch.nn.init.normal_(parameter, std=self.config.init_method_std)
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, cut, 1)
        parameter.register_post_accumulate_grad_hook(_add_in_place)
        # Megatron sums an expert's gradient over the ranks that hold it, and any other over all data-parallel ranks.
        parameter.allreduce = self.config.expert_model_parallel_size == 1  # pyright: ignore[reportAttributeAccessIssue]
        return parameter

    def _activate(self, hidden: torch.Tensor, probs_T: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up [T, F], times the probabilities."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(hidden, None, probs_T.unsqueeze(-1))
        gate, up = hidden.chunk(2, -1)
        return (F.silu(gate) * up * probs_T.unsqueeze(-1)).to(hidden.dtype)

    def _sharded(
        self, key: str, weight: torch.Tensor, offsets: Offsets, cut: int
    ) -> ShardedTensor | ShardedTensorFactory:
        """Returns the weight, of which ETP cuts the axis `cut`. Gate and up are cut each for itself."""
        rank, size, first = self._etp_group.rank(), self._etp_group.size(), len(offsets)
        place = (first, self._ep_group.rank(), self._ep_group.size())
        replica = (0, 0, self._edp_group.rank())

        def shard(
            tensor: torch.Tensor, index: int, count: int, key: str = key, replica: ReplicaId = replica
        ) -> ShardedTensor:
            at = (first + cut, index, count)
            return ShardedTensor.from_rank_offsets(
                key, tensor, *offsets, place, at, replica_id=replica, prepend_axis_num=first
            )

        def gate_and_up(key: str, tensor: torch.Tensor, replica: ReplicaId, flattened: object) -> Any:
            gate, up = tensor.chunk(2, cut)
            return [shard(gate, rank, 2 * size, key, replica), shard(up, rank + size, 2 * size, key, replica)]

        if weight is not self.weight1:
            return shard(weight, rank, size)

        def join(parts: Any) -> torch.Tensor:
            return torch.cat(parts, cut)

        return ShardedTensorFactory(key, weight, gate_and_up, join, replica)


def with_grouped_experts(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Returns a spec whose layers of experts have GroupedExperts."""
    assert spec.layer_specs is not None
    layers = []
    for layer in spec.layer_specs:
        parts: Any = layer.submodules
        if parts.mlp.module is not MoELayer:
            layers.append(layer)
            continue
        experts = replace(parts.mlp.submodules, experts=ModuleSpec(module=GroupedExperts))
        layers.append(replace(layer, submodules=replace(parts, mlp=replace(parts.mlp, submodules=experts))))
    return replace(spec, layer_specs=layers)


def _add_in_place(parameter: Any) -> None:
    """Adds a gradient to Megatron's float32 buffer, which Megatron does not do again."""
    _add(parameter.main_grad, parameter.grad)
    parameter.grad_added_to_main_grad = True


@jit_fuser  # on a GPU torch adds bfloat16 to float32 at half of the memory's speed
def _add(total: torch.Tensor, part: torch.Tensor) -> None:
    total.add_(part)


def require_groupable(config: TransformerConfig) -> None:
    """Checks a model before its layers are built, since Megatron adds the names of all layers to their errors."""
    assert config.moe_ffn_hidden_size is not None
    width = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
    for name in _UNSUPPORTED:
        if getattr(config, name, None):
            raise InvalidInput(
                f"trainer.megatron.transformer_config_kwargs.{name}: experts in one grouped product do not support it; "
                "leave it out, or set trainer.megatron.moe.grouped_gemm to false",
                field="trainer.megatron.moe.grouped_gemm",
            )
    for size in (config.hidden_size, width):
        if size * config.params_dtype.itemsize % GROUPED_ALIGN_BYTES:
            raise InvalidInput(
                f"trainer.megatron.moe.grouped_gemm: experts of {config.hidden_size} x {width} on each rank do not "
                f"have rows of a multiple of {GROUPED_ALIGN_BYTES} bytes; set it to false",
                field="trainer.megatron.moe.grouped_gemm",
            )
