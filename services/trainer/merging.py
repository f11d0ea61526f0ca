"""Merges low-rank adapters into the weights that are published: W + scale * B A.

The sum is computed in float32 and rounded once to the dtype of W. On a GPU one matrix product does that, which reads W
and writes the sum; float32 copies of W and of B A would move nine times as many bytes. cuBLAS chooses the order of
summation, so a merged bfloat16 weight may differ in its last bit from the result of another order. The trainer
publishes exactly the weights that it merged, and both ends hash those bytes.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Suffixes: G groups of rows, O rows of a group, I inputs, R the rank of the adapter.


def add_product(weight_GOI: torch.Tensor, b_GOR: torch.Tensor, a_RI: torch.Tensor, scale: float) -> None:
    """Adds scale * B A to a weight in place. All have one dtype."""
    if weight_GOI.is_cuda:
        with _float32_sums():
            weight_GOI.baddbmm_(b_GOR, a_RI.expand(len(weight_GOI), -1, -1), alpha=scale)
        return
    weight_GOI.copy_(weight_GOI.float() + scale * (b_GOR.float() @ a_RI.float()))


@contextlib.contextmanager
def _float32_sums() -> Iterator[None]:
    """Keeps cuBLAS from adding partial sums in bfloat16, which torch allows it by default."""
    settings: Any = torch.backends.cuda.matmul
    allowed = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = allowed
