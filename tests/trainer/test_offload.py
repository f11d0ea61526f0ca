"""Groups of tensors that a caller evicts, and restores."""

import pytest
import torch

from services.trainer.backend import GRADS, OPTIMIZER, PARAMS, Offloader

CPU = torch.device("cpu")


class Tensors:
    def __init__(self) -> None:
        self.params = [torch.arange(5.0), torch.arange(3, dtype=torch.bfloat16)]
        self.grads = [torch.ones(7)]
        self.states = [torch.arange(9.0) + 100]

    def offloader(self, *leaving: str) -> Offloader:
        groups = {PARAMS: lambda: self.params, GRADS: lambda: self.grads, OPTIMIZER: lambda: self.states}
        return Offloader(groups, frozenset(leaving), CPU)

    def sizes(self) -> list[int]:
        return [tensor.untyped_storage().nbytes() for tensor in (*self.params, *self.grads, *self.states)]


def test_what_was_evicted_comes_back_bit_for_bit_and_gradients_as_zeros():
    tensors = Tensors()
    offloader = tensors.offloader()
    wanted = [tensor.clone() for tensor in (*tensors.params, *tensors.states)]
    sizes = tensors.sizes()
    for _ in range(2):
        assert offloader.device_bytes() == sum(sizes) == 90
        offloader.evict(PARAMS, GRADS, OPTIMIZER)
        assert (tensors.sizes(), offloader.device_bytes()) == ([0] * 4, 0)
        assert offloader.needed_bytes(PARAMS, OPTIMIZER) == 20 + 6 + 36
        offloader.evict(PARAMS)  # nothing happens twice
        offloader.restore(PARAMS, GRADS, OPTIMIZER)
        offloader.restore(PARAMS)
        assert tensors.sizes() == sizes
    assert all(map(torch.equal, (*tensors.params, *tensors.states), wanted))
    assert not tensors.grads[0].any()
    assert offloader.needed_bytes(PARAMS) == 0


def test_a_group_that_has_grown_fits():
    tensors = Tensors()
    offloader = tensors.offloader()
    offloader.evict(OPTIMIZER)
    offloader.restore(OPTIMIZER)
    before = offloader.host_bytes()
    tensors.states.append(torch.full((400,), 3.0))
    offloader.evict(OPTIMIZER)
    assert offloader.host_bytes() > before
    offloader.restore(OPTIMIZER)
    assert tensors.states[0].tolist() == [100.0 + index for index in range(9)]
    assert tensors.states[1].eq(3).all()


def test_a_group_that_leaves_between_phases_stays_away_until_a_phase_needs_it():
    tensors = Tensors()
    offloader = tensors.offloader(PARAMS)
    offloader.offload(PARAMS, OPTIMIZER)
    assert [size > 0 for size in tensors.sizes()] == [False, False, True, True]
    offloader.evict(PARAMS, OPTIMIZER)
    with pytest.raises(AssertionError, match="restored"):
        offloader.load(PARAMS)
    assert offloader.needed_bytes(PARAMS, OPTIMIZER) == 36
    offloader.restore(PARAMS, OPTIMIZER)
    assert [size > 0 for size in tensors.sizes()] == [False, False, True, True]
    offloader.load(PARAMS)
    assert tensors.params[0].tolist() == [0, 1, 2, 3, 4]


def test_groups_that_the_model_does_not_have_are_ignored():
    offloader = Offloader({PARAMS: lambda: []}, frozenset(), CPU)
    offloader.evict(PARAMS, OPTIMIZER)
    offloader.restore(PARAMS, OPTIMIZER)
    assert offloader.host_bytes() == offloader.device_bytes() == 0
