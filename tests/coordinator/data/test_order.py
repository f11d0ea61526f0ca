"""Tests a run's batches: every prompt once per epoch, none twice in a batch, and determined only by the arguments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.data.order import EpochOrder


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """Draws numbers of prompts and of prompts per step, often nearly equal, so that most batches span two epochs."""
    num_prompts = draw(st.integers(1, 60))
    return num_prompts, draw(st.integers(1, num_prompts))


@settings(max_examples=300, deadline=None)
@given(sizes(), st.integers(0, 2**31 - 1), st.booleans(), st.integers(1, 6))
def test_every_epoch_is_a_permutation_and_no_batch_repeats_a_prompt(size, seed, shuffle, num_epochs):
    num_prompts, per_step = size
    order = EpochOrder(num_prompts, per_step, seed=seed, shuffle=shuffle)
    num_steps = -(-num_epochs * num_prompts // per_step)
    batches = [order.indices(step) for step in range(num_steps)]
    assert all(len(batch) == per_step == len(set(batch.tolist())) for batch in batches)
    drawn = np.concatenate(batches)[: num_epochs * num_prompts].reshape(num_epochs, num_prompts)
    assert (np.sort(drawn, axis=1) == np.arange(num_prompts)).all()


@settings(max_examples=200, deadline=None)
@given(sizes(), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_a_batch_does_not_depend_on_what_was_asked_before(size, seed, steps):
    used = EpochOrder(*size, seed=seed, shuffle=True)
    for step in steps:
        fresh = EpochOrder(*size, seed=seed, shuffle=True)
        assert used.indices(step).tolist() == fresh.indices(step).tolist()


def test_order_changes_with_epoch_and_seed():
    # There are 50! orders, so two of a hundred are never equal by chance.
    orders = [EpochOrder(50, 50, seed=seed, shuffle=True).indices(step) for seed in range(10) for step in range(10)]
    assert len({tuple(order.tolist()) for order in orders}) == 100


def test_every_position_is_equally_likely():
    order = EpochOrder(5, 5, seed=3, shuffle=True)
    positions = np.stack([np.argsort(order.indices(step)) for step in range(4000)])
    counts = np.stack([np.bincount(positions[:, prompt], minlength=5) for prompt in range(5)])
    # Each of 25 counts is binomial (4000, 1/5): mean 800, deviation 25. Six deviations happen once in 20 million runs.
    assert abs(counts - 800).max() < 6 * 25.3


def test_without_shuffle_the_order_is_that_of_the_file():
    order = EpochOrder(5, 2, seed=0, shuffle=False)
    assert [order.indices(step).tolist() for step in range(5)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_the_order_is_the_same_in_every_release():
    """A resumed run must continue in the same order on any machine and with any version of numpy."""
    order = EpochOrder(10, 4, seed=7, shuffle=True)
    assert [order.indices(step).tolist() for step in range(6)] == [
        [1, 8, 6, 5],
        [9, 2, 4, 7],
        [0, 3, 1, 4],
        [9, 3, 2, 6],
        [5, 8, 0, 7],
        [6, 2, 5, 7],
    ]


def test_a_step_after_thousands_of_epochs():
    order = EpochOrder(3, 2, seed=0, shuffle=True)
    late = order.indices(15_000)
    assert order.indices(0).tolist() == EpochOrder(3, 2, seed=0, shuffle=True).indices(0).tolist()
    assert order.indices(15_000).tolist() == late.tolist()


@pytest.mark.parametrize(("num_prompts", "per_step"), [(12, 4), (10, 4), (7, 3), (6, 4), (5, 5)])
def test_the_first_step_after_a_resume_is_that_of_a_run_in_one_piece(num_prompts: int, per_step: int) -> None:
    whole = EpochOrder(num_prompts, per_step, seed=3, shuffle=True)
    for step in range(40):
        resumed = EpochOrder(num_prompts, per_step, seed=3, shuffle=True)
        assert resumed.indices(step).tolist() == whole.indices(step).tolist()


@pytest.mark.parametrize(("num_prompts", "per_step"), [(3, 4), (0, 1), (3, 0)])
def test_a_batch_must_fit_in_an_epoch(num_prompts, per_step):
    with pytest.raises(ValueError, match="must be in 1"):
        EpochOrder(num_prompts, per_step, seed=0, shuffle=True)


def test_negative_step():
    with pytest.raises(ValueError, match="step -1 is negative"):
        EpochOrder(3, 1, seed=0, shuffle=True).indices(-1)
