"""Checks that routes were replayed, before an update is applied."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from services.common.errors import InternalError
from services.trainer.backend import Backend, ReplaysRoutes
from services.trainer.updates.packing import Pack


class Replayed:
    """Adds up what an update has replayed."""

    def __init__(self) -> None:
        self._num_tokens = self._num_experts = self._num_agreeing = 0.0

    def add(self, backend: Backend, packs: Sequence[Pack]) -> None:
        """Compares `packs`, which `backend` has just accumulated, with what it has replayed.

        Raises:
            InternalError: Some token of some layer was computed with other experts. The gradients are discarded.
        """
        routes = [pack.routes_TLK for pack in packs if pack.routes_TLK is not None]
        if not routes:
            return
        num_tokens = torch.tensor(float(sum(map(len, routes))), dtype=torch.float64, device=backend.device)
        num_tokens = float(backend.reduce(num_tokens, dist.ReduceOp.SUM))
        num_layers, top_k = routes[0].shape[1:]
        counts = backend.replayed().tolist() if isinstance(backend, ReplaysRoutes) else [0.0, 0.0]
        if counts[0] != num_tokens * num_layers:
            backend.discard_gradients()
            raise InternalError(
                f"{counts[0]:g} routes of {num_tokens:g} tokens x {num_layers} layers were replayed, so some were "
                "ignored; nothing was applied. Set trainer.moe.replay_routes to off to train without them"
            )
        self._num_tokens += num_tokens
        self._num_experts += counts[0] * top_k
        self._num_agreeing += counts[1]

    def metrics(self) -> dict[str, float]:
        """Returns the number of replayed tokens, prompts included, and the share of their experts that the trainer's
        router would have chosen too; nothing if the batch has no routes."""
        if not self._num_tokens:
            return {}
        return {
            "moe_replayed_tokens": self._num_tokens,
            "moe_route_agreement": self._num_agreeing / self._num_experts,
        }
