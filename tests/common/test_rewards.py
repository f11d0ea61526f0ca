"""Tests that rewards that are equal on paper are equal here, in any order of summation, and that others differ."""

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.rewards import all_equal, is_above, is_constant, reaches, total, weighted_sum

cents = st.integers(-(10**9), 10**9)
# What people write: up to nine digits, from millionths to millions.
decimals = st.tuples(cents, st.integers(-6, 6)).map(lambda pair: Decimal(pair[0]).scaleb(pair[1] - 3))
terms = st.lists(st.tuples(decimals, decimals), min_size=1, max_size=6)


@given(terms, st.randoms(use_true_random=False))
def test_a_sum_is_that_on_paper_in_any_order(pairs: list[tuple[Decimal, Decimal]], chance):
    numbers = [(float(weight), float(value)) for weight, value in pairs]
    on_paper = float(sum(weight * value for weight, value in pairs))
    assert weighted_sum(numbers) == on_paper
    assert weighted_sum(chance.sample(numbers, len(numbers))) == on_paper


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.sampled_from([-1e6, -3.0, 0.25, 1.0, 1e6]))
def test_shares_of_a_whole_add_up_to_it_however_they_are_rounded(parts: list[int], whole: float):
    """Scores may be rounded, and a scorer may add them one after another: the error is below the resolution."""
    shares = [whole * part / sum(parts) for part in parts]
    sums = [total(shares), sum(shares), sum(reversed(shares)), math.fsum(shares), whole]
    assert all_equal(np.array(sums))
    assert reaches(np.array(sums), whole).all()
    assert not any(is_above(one, than) for one, than in itertools.permutations(sums, 2))


@given(st.floats(-1e6, 1e6), st.sampled_from([1e-6, 1e-5, 0.01, 1.0]), st.lists(st.booleans(), min_size=2, max_size=6))
def test_a_real_difference_counts_at_any_size(reward: float, difference: float, larger: list[bool]):
    rewards = np.array([reward + difference * one for one in larger])
    assert all_equal(rewards) == (len(set(larger)) == 1)
    assert is_above(reward + difference, reward)
    assert not is_above(reward, reward + difference)
    assert reaches(rewards, reward + difference).tolist() == larger


@pytest.mark.parametrize("difference", [1e-6, 1e-9, 1e-12])
def test_tiny_rewards_differ_too(difference: float):
    assert not all_equal(np.array([0.0, difference]))
    assert not reaches(np.array([-difference]), 0.0)[0]
    assert is_above(difference, 0.0)


def test_by_is_a_margin_that_must_be_passed():
    assert not is_above(0.8, 0.7, 0.1)  # 0.7 + 0.1 is a little less than 0.8
    assert not is_above(0.3, 0.1, 0.2)  # 0.1 + 0.2 is a little more than 0.3
    assert is_above(0.81, 0.7, 0.1)


def test_nan_is_equal_to_nothing_and_passes_nothing():
    nan, inf = math.nan, math.inf
    assert not all_equal(np.array([1.0, nan]))
    assert not all_equal(np.array([nan, nan]))
    assert reaches(np.array([nan, inf, -inf]), 0.0).tolist() == [False, True, False]
    assert not any(is_above(*pair) for pair in ((nan, 0.0), (0.0, nan), (nan, nan), (inf, inf), (-inf, 0.0)))
    assert is_above(inf, 1e300)
    assert all_equal(np.array([inf, inf]))
    assert not all_equal(np.array([inf, -inf]))
    assert math.isnan(weighted_sum([(1.0, inf), (-1.0, inf)]))
    assert weighted_sum([(1e200, -1e200), (1.0, 1.0)]) == -inf
    assert weighted_sum([]) == 0.0


def test_every_group_by_itself():
    rewards, groups = np.array([0.3, 1.0, 0.1 + 0.2, 2.0, 5.0]), np.array([0, 1, 0, 1, 3])
    assert is_constant(rewards, groups).tolist() == [True, False, True, True]
    assert is_constant(np.array([]), np.array([], int)).tolist() == []
    assert all_equal(np.array([]))
