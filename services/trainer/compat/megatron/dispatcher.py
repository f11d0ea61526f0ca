"""Spares a rank that holds all experts what only several ranks need.

Reason: Megatron's all-to-all dispatcher sorts the tokens by expert a second time, and waits in every layer until the
GPU has counted each expert's tokens, also where no rank sends any. Seen with Megatron-Core 0.16.1.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from services.trainer.compat.torch import set_class


class OneRankDispatcher(MoEAlltoAllTokenDispatcher):
    """Sorts tokens by expert once, and keeps the counts on the device. Nothing is sent."""

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Returns the number of tokens of each expert, on the device."""
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        return routing_map.sum(dim=0)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        return tokens_per_expert


def skip_dispatch(chunk: torch.nn.Module) -> None:
    """Uses OneRankDispatcher in the layers whose experts are all on this rank, and which drop and pad no tokens."""
    for layer in chunk.modules():
        dispatcher = layer.token_dispatcher if isinstance(layer, MoELayer) else None
        if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
            continue
        config = dispatcher.config
        is_plain = config.moe_expert_capacity_factor is None and not config.moe_router_padding_for_quantization
        if dispatcher.ep_size == dispatcher.tp_size == 1 and is_plain:
            set_class(dispatcher, OneRankDispatcher)  # pyright: ignore[reportArgumentType]
            dispatcher.num_local_experts = 1  # with more it would sort them
