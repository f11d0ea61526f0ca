"""Returns the library versions that all members of a weight group must share."""

import torch
from torch.cuda import nccl


def accelerator_libraries() -> dict[str, str]:
    """Returns the versions of CUDA and NCCL that this process's torch was built with; empty for a CPU build."""
    if torch.version.cuda is None:
        return {}
    return {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl.version()))}
