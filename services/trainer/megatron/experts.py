"""Computes all experts of a layer with one grouped matrix product per matrix (torch.nn.functional.grouped_mm).

The experts on a rank share two parameters. TransformerEngine has a parameter for each expert, and the CPU's work for
thousands of them takes longer than the GPU's.
"""

from collections.abc import Callable, Iterator
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
from services.common.families.architecture import Architecture
from services.trainer.compat.torch import GROUPED_ALIGN_BYTES

# The place of a tensor in axes that are added in front: axis, index, number.
Offsets = tuple[tuple[int, int, int], ...]

_UNSUPPORTED = ("fp4", "moe_apply_probs_on_input", "moe_latent_size", "use_te_activation_func")


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
        self._make_parameters(num_local_experts, config.moe_ffn_hidden_size // self._etp_group.size())
        recomputed = config.recompute_modules or ()
        self._is_recomputed = config.recompute_granularity == "selective" and "moe_act" in recomputed

    def forward(
        self, tokens_TH: torch.Tensor, tokens_per_expert: torch.Tensor, probs_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Returns each token's output [T, H], times its probability. Tokens are sorted by expert."""
        ends_E = tokens_per_expert.to(tokens_TH.device, non_blocking=True).cumsum(0).to(torch.int32)
        hidden = self._gate_up(tokens_TH, ends_E)
        if not self._is_recomputed:
            return self._project_down(self._activate(hidden, probs_T), probs_T, ends_E), None
        checkpoint = tensor_parallel.CheckpointWithoutOutput()
        activated = checkpoint.checkpoint(self._activate, hidden, probs_T)
        out = self._project_down(activated, probs_T, ends_E)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Returns the weights under the names and shapes of Megatron's own experts."""
        keys, cut = f"{prefix}experts.linear_fc", (2, self._etp_group.rank(), self._etp_group.size())
        return {
            f"{prefix}weight1": self._gate_and_up_sharded(f"{keys}1.weight", self.weight1, sharded_offsets),
            f"{prefix}weight2": self._sharded(f"{keys}2.weight", self.weight2, sharded_offsets, cut, self._replica),
        }

    def expert_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields a view of each local expert's matrices, under TransformerEngine's names (`linear_fc1.weight3`)."""
        for layer, weight in (("linear_fc1", self.weight1), ("linear_fc2", self.weight2)):
            for expert, matrix in enumerate(weight.detach()):
                cut = 0 if layer == "linear_fc1" else 1
                tensor_parallel.set_tensor_model_parallel_attributes(matrix, True, cut, 1)
                yield f"{layer}.weight{expert}", matrix

    def _make_parameters(self, num_experts: int, width: int) -> None:
        hidden = self.config.hidden_size
        self.weight1 = self._parameter(num_experts, 2 * width, hidden, cut=1)
        self.weight2 = self._parameter(num_experts, hidden, width, cut=2)

    def _parameter(self, *shape: int, cut: int | None) -> torch.nn.Parameter:
        """Makes a parameter of which ETP cuts an axis; a whole one gets a part of its gradient on each ETP rank."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        if self.config.perform_initialization:
            torch.nn.init.normal_(parameter, std=self.config.init_method_std)
        if cut is None:
            parameter.sequence_parallel = self.config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        else:
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, cut, 1)
        parameter.register_post_accumulate_grad_hook(_add_in_place)
        # Megatron sums an expert's gradient over the ranks that hold it, and any other over all data-parallel ranks.
        parameter.allreduce = self.config.expert_model_parallel_size == 1  # pyright: ignore[reportAttributeAccessIssue]
        return parameter

    def _gate_up(self, tokens_TH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(tokens_TH, self.weight1.transpose(1, 2), offs=ends_E)

    def _project_down(self, activated_TF: torch.Tensor, probs_T: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(activated_TF, self.weight2.transpose(1, 2), offs=ends_E)

    def _activate(self, hidden: torch.Tensor, probs_T: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up [T, F], times the probabilities."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(hidden, None, probs_T.unsqueeze(-1))
        gate, up = hidden.chunk(2, -1)
        return (F.silu(gate) * up * probs_T.unsqueeze(-1)).to(hidden.dtype)

    def _gate_and_up_sharded(self, key: str, weight: torch.Tensor, offsets: Offsets) -> ShardedTensorFactory:
        """Returns the weight that stacks gate and up, which ETP cuts each for itself."""
        rank, size = self._etp_group.rank(), self._etp_group.size()

        def gate_and_up(key: str, tensor: torch.Tensor, replica: ReplicaId, flattened: object) -> Any:
            parts = enumerate(tensor.chunk(2, 1))
            return [self._sharded(key, part, offsets, (1, rank + n * size, 2 * size), replica) for n, part in parts]

        def join(parts: Any) -> torch.Tensor:
            return torch.cat(parts, 1)

        return ShardedTensorFactory(key, weight, gate_and_up, join, self._replica)

    def _sharded(
        self, key: str, tensor: torch.Tensor, offsets: Offsets, cut: tuple[int, int, int] | None, replica: ReplicaId
    ) -> ShardedTensor:
        """Returns a tensor whose first axis EP distributes. `cut` is the axis that ETP cuts, and which of how many
        parts this is."""
        first = len(offsets)
        places = [(first, self._ep_group.rank(), self._ep_group.size())]
        if cut is not None:
            places.append((first + cut[0], *cut[1:]))
        return ShardedTensor.from_rank_offsets(
            key, tensor, *offsets, *places, replica_id=replica, prepend_axis_num=first
        )

    @property
    def _replica(self) -> ReplicaId:
        return 0, 0, self._edp_group.rank()


class StackedExperts(GroupedExperts):
    """Computes experts with biases, whose parameters have the names and the layout of the checkpoint (gpt-oss, arXiv
    2508.10925): `gate_up_proj` [E, H, 2F], of which the columns of gate and up alternate, and `down_proj` [E, F, H].
    """

    gate_up_proj: torch.nn.Parameter
    gate_up_proj_bias: torch.nn.Parameter
    down_proj: torch.nn.Parameter
    down_proj_bias: torch.nn.Parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        rank, size = self._etp_group.rank(), self._etp_group.size()
        entries: dict[str, ShardedTensor] = {}
        for name, parameter in self.named_parameters(recurse=False):
            axis = self._axes[name]
            cut, replica = ((axis, rank, size), 0) if axis is not None else (None, rank)
            key, place = f"{prefix}experts.{name}", (0, replica, self._edp_group.rank())
            entries[f"{prefix}{name}"] = self._sharded(key, parameter, sharded_offsets, cut, place)
        return dict(entries)

    def expert_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters, each of which has all experts."""
        yield from self.named_parameters(recurse=False)

    def _make_parameters(self, num_experts: int, width: int) -> None:
        hidden = self.config.hidden_size
        self._axes: dict[str, int | None] = {}
        for name, shape, cut in (
            ("gate_up_proj", (hidden, 2 * width), 2),
            ("gate_up_proj_bias", (2 * width,), 1),
            ("down_proj", (width, hidden), 1),
            ("down_proj_bias", (hidden,), None),
        ):
            self._axes[name] = cut
            self.register_parameter(name, self._parameter(num_experts, *shape, cut=cut))

    def _gate_up(self, tokens_TH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        hidden = F.grouped_mm(tokens_TH, self.gate_up_proj, offs=ends_E)
        return hidden + self.gate_up_proj_bias[_expert_of_each(hidden, ends_E)]

    def _activate(self, hidden: torch.Tensor, probs_T: torch.Tensor) -> torch.Tensor:
        limit = self.config.activation_func_clamp_value
        assert limit is not None, "the model's config has it"
        return _clamped_swiglu(hidden, probs_T, limit)

    def _project_down(self, activated_TF: torch.Tensor, probs_T: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        out = F.grouped_mm(activated_TF, self.down_proj, offs=ends_E)
        # ETP ranks add their outputs, so each adds its share of the bias.
        bias = self.down_proj_bias[_expert_of_each(out, ends_E)] * (probs_T / self._etp_group.size()).unsqueeze(-1)
        return out + bias.to(out.dtype)


def _expert_of_each(rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns the number of the expert of each row; those of expert e end before row ends_E[e]."""
    return torch.searchsorted(ends_E, torch.arange(rows.size(0), dtype=ends_E.dtype, device=rows.device), right=True)


_ALPHA = 1.702  # which no published model changes


@jit_fuser
def _clamped_swiglu(hidden: torch.Tensor, probs_T: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate) [T, F] of clamped gates and ups, times the probabilities."""
    gate, up = hidden[..., ::2].clamp(max=limit), hidden[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(gate * _ALPHA) * probs_T.unsqueeze(-1)).to(hidden.dtype)


def with_grouped_experts(spec: TransformerBlockSubmodules, model: Architecture) -> TransformerBlockSubmodules:
    """Returns a spec whose layers of experts have GroupedExperts, or StackedExperts if the model's are stacked."""
    kind = StackedExperts if model.has_stacked_experts else GroupedExperts

    def grouped(parts: Any) -> dict[str, object]:
        if parts.mlp.module is not MoELayer:
            return {}
        experts = replace(parts.mlp.submodules, experts=ModuleSpec(module=kind))
        return {"mlp": replace(parts.mlp, submodules=experts)}

    return with_parts(spec, grouped)


def with_parts(
    spec: TransformerBlockSubmodules, change: Callable[[Any], dict[str, object]]
) -> TransformerBlockSubmodules:
    """Returns a spec with other parts of layers: `change` takes those of a layer and returns the new ones by name."""
    assert spec.layer_specs is not None
    layers = []
    for layer in spec.layer_specs:
        parts: Any = layer.submodules
        layers.append(replace(layer, submodules=replace(parts, **change(parts))))
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
