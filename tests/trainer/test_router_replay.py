"""Tests the replay of a layer's routed experts: the experts that it chooses in each pass, and its counts."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from services.common.errors import InternalError
from services.trainer.router_replay import NO_EXPERT, LayerReplay, ModelReplay

OWN = torch.tensor([[0, 1], [2, 3], [1, 3]])


@pytest.mark.usefixtures("one_rank")  # counts are summed over ranks
def test_rows_without_routed_experts_keep_the_routers_choice_and_are_not_counted() -> None:
    layer = LayerReplay()
    layer.begin()
    layer.feed(torch.tensor([[1, 0], [0, 2], [NO_EXPERT, NO_EXPERT]], dtype=torch.int32))
    assert layer.choose(OWN).tolist() == [[1, 0], [0, 2], [1, 3]]
    layer.feed(None)
    assert layer.choose(OWN) is OWN
    layer.end()
    # Of the first row both experts would have been chosen too, of the second one.
    assert ModelReplay({0: layer, 1: LayerReplay()}, OWN.device).counts().tolist() == [2.0, 3.0]
    layer.begin()
    assert ModelReplay({0: layer}, OWN.device).counts().tolist() == [0.0, 0.0]


def test_routed_experts_of_another_number_of_rows_are_refused() -> None:
    layer = LayerReplay()
    layer.feed(OWN[:2])
    with pytest.raises(InternalError, match=r"\[3, 2\].*\[2, 2\]"):
        layer.choose(OWN)


class Recomputed:
    """Two micro-batches through a checkpointed layer, both forward passes first, as in a pipeline."""

    def __init__(self) -> None:
        self.layer, self.chosen, self.losses = LayerReplay(), [], []
        self.layer.begin()
        for routed_experts in (OWN, OWN.flip(1)):
            self.layer.feed(routed_experts)
            x = torch.ones(3, 2, requires_grad=True)
            self.losses.append(checkpoint(self._compute, x, use_reentrant=False).sum())

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.layer.choose(OWN)
        self.chosen.append(experts.tolist())
        return x.exp() * experts


def test_a_layer_is_recomputed_with_the_experts_of_its_own_forward_pass() -> None:
    run = Recomputed()
    for loss in run.losses:
        loss.backward()
    run.layer.end()
    assert run.chosen == [OWN.tolist(), OWN.flip(1).tolist()] * 2
    assert run.layer.counts_2 is not None and run.layer.counts_2.tolist() == [6.0, 12.0]  # forward passes only


def test_what_micro_batches_chose_is_not_kept_after_their_passes() -> None:
    layer, routed_experts = LayerReplay(), OWN.flip(1)
    kept = weakref.ref(routed_experts)
    layer.begin()
    layer.feed(routed_experts)
    layer.choose(OWN)
    layer.end()
    del routed_experts
    assert kept() is None


def test_recomputing_some_micro_batches_only_is_refused() -> None:
    run = Recomputed()
    run.losses[0].backward()
    with pytest.raises(InternalError, match="recomputed for 1 of 2"):
        run.layer.end()
