"""Makes the routers of Megatron's layers of experts use given experts.

Reason: Megatron's own RouterReplay keeps all routers of a process in one global list, also those of other roles, and
the caller must tell it when a layer is recomputed. Its hook in the router is used here with another object. A fused
router does not call the hook. Seen with Megatron-Core 0.16.1.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

# Takes the experts that the router chooses, [rows, top_k]; returns those to compute with.
Choose = Callable[[torch.Tensor], torch.Tensor]


class _Replay:
    """Stands in for Megatron's RouterReplay, of which the router calls only this method."""

    def __init__(self, choose: Choose):
        self._choose = choose

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scores of the experts to compute with, and their numbers."""
        assert default_compute_topk is not None, "Megatron's router gives it"
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._choose(own)
        return scores.gather(1, experts), experts


def set_choice(layer: TransformerLayer, choose: Choose) -> None:
    """Makes the router of a layer of experts compute with what `choose` returns."""
    assert isinstance(layer.mlp, MoELayer) and isinstance(layer.mlp.router, TopKRouter)
    layer.mlp.router.router_replay = _Replay(choose)  # pyright: ignore[reportAttributeAccessIssue]  it is duck-typed
