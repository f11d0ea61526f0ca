"""What the members of a weight group must have in common."""

import torch
from torch.cuda import nccl


def accelerator_libraries() -> dict[str, str]:
    """Versions of the CUDA and NCCL that this process's torch brings; nothing if it has no CUDA."""
    if torch.version.cuda is None:
        return {}
    return {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl.version()))}
