"""Adds and compares rewards. Everything that asks whether rewards are equal, pass or are better asks here.

A reward is a sum of floats, so rewards that are equal on paper may differ in their last bits: .1 + .2 is not .3, and
.7 + .2 + .1 is not 1. Sums are exact here (`weighted_sum`), and comparisons leave out what is below RESOLUTION, because
the scores themselves may be rounded: three scores of 1/3.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

RESOLUTION = 1e-13
"""Rewards are equal if they differ by at most this or, above 1, by at most this share of them.

It is 450 times the spacing of floats, which covers the rounding of sums of hundreds of scores, and far below what
anybody means by a difference: at rewards of 1e6, differences of 1e-6 still count.
"""


def weighted_sum(terms: Iterable[tuple[float, float]]) -> float:
    """Returns the sum of weight * value, rounded once, so that it is the same in any order.

    Numbers count as they are written: a weight of 0.1 is a tenth, and not the nearest float. The result is infinite or
    NaN if a term is, also because it is too large for a float.
    """
    pairs = list(terms)
    products = [weight * value for weight, value in pairs]
    if not all(map(math.isfinite, products)):
        return sum(products)
    exact = sum((Fraction(repr(float(weight))) * Fraction(repr(float(value))) for weight, value in pairs), Fraction())
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def total(rewards: Iterable[float]) -> float:
    """Returns the sum of `rewards`, like `weighted_sum`."""
    return weighted_sum((1.0, reward) for reward in rewards)


def reaches(rewards: np.ndarray, threshold: float) -> np.ndarray:
    """Returns whether each of `rewards` is at least `threshold`; NaN is not."""
    return rewards >= threshold - RESOLUTION * max(1.0, abs(threshold))


def is_above(reward: float, than: float, by: float = 0.0) -> bool:
    """Returns whether `reward` is above another by more than `by`. NaN never is."""
    return reward - than - by > RESOLUTION * max(1.0, min(abs(reward), abs(than)))


def all_equal(rewards: np.ndarray, resolution: float = RESOLUTION) -> bool:
    """Returns whether all `rewards` are equal; True if there are none, False if one is NaN."""
    return bool(is_constant(rewards, np.zeros(len(rewards), int), resolution).all())


def is_constant(rewards: np.ndarray, groups: np.ndarray, resolution: float = RESOLUTION) -> np.ndarray:
    """Returns whether all rewards of each group are equal, bool [groups.max() + 1]; True for a group without any.

    Args:
        rewards: float64 [n].
        groups: Index of each reward's group, from 0.
        resolution: What to use in place of RESOLUTION, for numbers that were kept with fewer digits.
    """
    num_groups = int(groups.max(initial=-1)) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    with np.errstate(invalid="ignore"):  # NaN, and infinity - infinity, which `low >= high` decides
        np.minimum.at(low, groups, rewards)
        np.maximum.at(high, groups, rewards)
        least = resolution * np.maximum(1.0, np.minimum(np.abs(low), np.abs(high)))
        return (low >= high) | ((high - low <= least) & np.isfinite(least))
