"""Merges low-rank adapters into the weights that are published: W + scale * B A.

The sum is computed in float32 and rounded once to the dtype of W. On a GPU one kernel does that, which reads W and
writes the sum; float32 copies of W and of B A would move nine times as many bytes. The order of summation is the
device's, so a merged bfloat16 weight may differ in its last bit from the result of another order. The trainer publishes
exactly the weights that it merged, and both ends hash those bytes.
"""

import torch

# Suffixes: G groups of rows, O rows of a group, I inputs, R the rank of the adapter.


def write_merged(
    target_GOI: torch.Tensor, weight_GOI: torch.Tensor, b_GOR: torch.Tensor, a_RI: torch.Tensor, scale: float
) -> None:
    """Writes W + scale * B A into a tensor, which may be W itself. All have one dtype; the groups may be left out."""
    if target_GOI.is_cuda:
        from services.trainer.merging_gpu import write_sum  # late: it imports Triton

        write_sum(target_GOI, weight_GOI, b_GOR, a_RI, scale)
        return
    target_GOI.copy_(weight_GOI.float() + scale * (b_GOR.float() @ a_RI.float()))
