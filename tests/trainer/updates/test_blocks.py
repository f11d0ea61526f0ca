"""Updates that fail between two mini-batches, on one real rank: the weights are neither the old ones nor the new."""

from typing import Any

import numpy as np
import pytest

from services.common.batches import BlockCutter, blocks_of, trained_tokens
from services.common.errors import InternalError
from services.trainer.backend import Role
from services.trainer.samples import train_parts
from services.trainer.updates.batch import Replayed
from tests.trainer.fsdp_harness import TEMPERATURE, Harness, samples
from tests.trainer.updating import counts_of


def in_blocks(harness: Harness) -> None:
    """Trains on two mini-batches, each of which is a block."""
    batch = samples()
    harness.worker.begin_batch(role=Role.POLICY, temperature=TEMPERATURE, is_one_block=False)
    totals = []
    for number, block in enumerate(blocks_of(batch, BlockCutter(1 << 20, 2))):
        (part,) = train_parts(block, harness._config, 1, Role.POLICY, {number: np.arange(block.num_rows)})
        harness.worker.add_block(role=Role.POLICY, **part.body, frames=part.frames)
        totals.append(counts_of(trained_tokens(block)))
    harness.worker.apply_batch(role=Role.POLICY, totals=totals, version=0)


@pytest.mark.parametrize("train", [in_blocks, lambda harness: harness.train(samples())], ids=["blocks", "whole"])
@pytest.mark.parametrize("failing", [0, 1])
def test_only_an_error_before_the_first_update_leaves_a_trainer_that_may_go_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, train: Any, failing: int
) -> None:
    harness.open("untied", {"num_minibatches": 2})
    before, added = harness.parameters(), []

    def add(*_: Any) -> None:
        added.append(len(added))
        if added[-1] == failing:
            raise InternalError("some routed experts were ignored")

    monkeypatch.setattr(Replayed, "add", add)
    # A rank survives only Lockstep's own errors.
    error, words = (RuntimeError, "update 2 of a batch") if failing else (InternalError, "some routed experts")
    with pytest.raises(error, match=words) as caught:
        train(harness)
    assert type(caught.value) is error
    harness.worker.drop_batch(role=Role.POLICY)
    after = harness.parameters()
    assert all(tensor.equal(before[name]) for name, tensor in after.items()) == (not failing)
    assert all(parameter.grad is None for parameter in harness.backend._model.parameters())


def test_blocks_count_alike_whether_or_not_weights_stay_gathered(harness: Harness) -> None:
    updated = []
    for reshards in (True, False):
        harness.open("untied", {"num_minibatches": 2, "fsdp": {"reshard_after_forward": reshards}})
        in_blocks(harness)
        updated.append(harness.parameters())
    assert all(updated[1][name].equal(tensor) for name, tensor in updated[0].items())
