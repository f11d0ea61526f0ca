"""Cuts a sequence for context parallelism as Megatron-Core and TransformerEngine do.

Reason: Megatron's rotary embedding of packed sequences (rope_utils.py) and TransformerEngine's attention expect this
layout, and Megatron's own function for it (utils.get_batch_on_this_cp_rank) does not support packed sequences. Seen
with Megatron-Core 0.16.1 and TransformerEngine 2.12.0.
"""

import torch


def zigzag(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Returns the positions, int64 [length / cp_size], of a sequence's tokens on `cp_rank`."""
    chunks = torch.arange(length).view(2 * cp_size, -1) if cp_size > 1 else torch.arange(length).view(1, -1)
    return torch.cat([chunks[cp_rank], chunks[-1 - cp_rank]]) if cp_size > 1 else chunks[0]
