"""How Megatron-Core and TransformerEngine cut a sequence for context parallelism.

Reason: neither has a function for it that is there without a GPU; the rotary embedding of packed sequences
(models/common/embeddings/rope_utils.py) and TransformerEngine's attention expect it. Seen with Megatron-Core 0.16.1.
"""

import torch


def zigzag(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Positions, int64 [length / cp_size], of a sequence's tokens on `cp_rank`."""
    chunks = torch.arange(length).view(2 * cp_size, -1) if cp_size > 1 else torch.arange(length).view(1, -1)
    return torch.cat([chunks[cp_rank], chunks[-1 - cp_rank]]) if cp_size > 1 else chunks[0]
