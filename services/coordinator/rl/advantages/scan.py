"""Computes discounted sums over the rest of each sample."""

import numpy as np


def discounted_sums(numbers_M: np.ndarray, count_S: np.ndarray, discount: float) -> np.ndarray:
    """Computes y_t = x_t + discount * y_(t+1) within each sample; sample s is the next count_S[s] of `numbers_M`.

    Processes all samples together from their ends, without padding: M additions in max(count_S) vector operations.
    """
    sums_M = numbers_M.copy()
    order = np.argsort(-count_S, kind="stable")
    last, descending = np.cumsum(count_S)[order] - 1, -count_S[order]
    for back in range(1, int(count_S.max(initial=0))):
        index = last[: np.searchsorted(descending, -back)] - back  # in samples with more than `back` tokens
        sums_M[index] += discount * sums_M[index + 1]
    return sums_M
