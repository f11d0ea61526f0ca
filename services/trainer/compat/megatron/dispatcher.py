"""Dispatchers that send tokens to the ranks of their experts with less work than Megatron's.

Reason: Megatron's all-to-all dispatcher sends a copy of a token for each of its experts, sorts the tokens by expert a
second time, and waits in every layer until the GPU has counted each expert's tokens, also where no rank sends any. Its
all-gather dispatcher refuses sequences of variable length, and waits twice. Seen with Megatron-Core 0.16.1.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from services.trainer.compat.torch import set_class

# No token is gathered as sent to an expert whose probability is this.
_NOT_CHOSEN = -1.0


class OneRankDispatcher(MoEAlltoAllTokenDispatcher):
    """Sorts tokens by expert once, and keeps the counts on the device. Nothing is sent."""

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Returns the number of tokens of each expert, on the device."""
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        return routing_map.sum(dim=0)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        return tokens_per_expert


class GatherDispatcher(MoEAlltoAllTokenDispatcher):
    """Gives every rank the tokens of all ranks, and sums the outputs of their experts.

    All ranks must have the same number of tokens. Suffixes: T tokens of a rank, A of all ranks, E experts of a rank,
    X of all ranks, R rows that a rank computes, H hidden size.
    """

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens [T, H], and the probabilities [T, X] with _NOT_CHOSEN where no token is sent."""
        self.hidden_shape = hidden_states.shape
        return hidden_states.view(-1, self.hidden_shape[-1]), probs.masked_fill(~routing_map, _NOT_CHOSEN)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens [A, H] and the probabilities [A, X] of all ranks."""
        tokens_AH = gather_from_sequence_parallel_region(permutated_local_input_tokens, group=self.ep_group)
        return tokens_AH, gather_from_sequence_parallel_region(permuted_probs, group=self.ep_group)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the rows of this rank's experts [R, H], sorted by expert, their number by expert, and their
        probabilities [R]. Waits until the device has counted them."""
        first = self.local_expert_indices[0]
        probs_AE = global_probs[:, first : first + self.num_local_experts].contiguous()
        self._map_AE = probs_AE > _NOT_CHOSEN
        self._gathered_shape = global_input_tokens.shape
        counts_E = self._map_AE.sum(0)
        rows_RH, probs_R, self._order = permute(
            global_input_tokens,
            self._map_AE,
            probs=probs_AE,
            num_out_tokens=int(counts_E.sum()),
            fused=self.config.moe_permute_fusion,
        )
        assert probs_R is not None, "permute returns the probabilities that it gets"
        return rows_RH, counts_E, probs_R

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the sum of each token's outputs on this rank [A, H]."""
        fused, shape = self.config.moe_permute_fusion, self._gathered_shape
        return unpermute(hidden_states, self._order, restore_shape=shape, routing_map=self._map_AE, fused=fused)

    def token_combine(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the sums over all ranks of this rank's tokens [T, H]."""
        return reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.ep_group)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Returns the tokens as the layer got them."""
        return permutated_local_input_tokens.view(self.hidden_shape)


def use_faster_dispatchers(chunk: torch.nn.Module, *, gathers: bool) -> None:
    """Uses OneRankDispatcher in the layers whose experts are all on this rank, and which drop and pad no tokens; with
    `gathers`, all layers have experts on several ranks and use GatherDispatcher."""
    for layer in chunk.modules():
        dispatcher = layer.token_dispatcher if isinstance(layer, MoELayer) else None
        if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
            continue
        if gathers:
            set_class(dispatcher, GatherDispatcher)
            continue
        config = dispatcher.config
        is_plain = config.moe_expert_capacity_factor is None and not config.moe_router_padding_for_quantization
        if dispatcher.ep_size == dispatcher.tp_size == 1 and is_plain:
            set_class(dispatcher, OneRankDispatcher)  # pyright: ignore[reportArgumentType]
            dispatcher.num_local_experts = 1  # with more it would sort them
