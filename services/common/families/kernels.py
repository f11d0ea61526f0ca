"""Chooses what computes attention with strategy fsdp. The trainer and `lockstep doctor` thus say the same."""

import enum
from importlib.util import find_spec

HAS_FLASH_ATTN = find_spec("flash_attn") is not None
# The largest heads of FlashAttention's kernels.
_MOST_OF_HEAD = 256


class Kernel(enum.StrEnum):
    """What computes attention."""

    TORCH = "torch's variable-length FlashAttention"
    FLASH_ATTN = "flash-attn"
    PADDED = "padded samples in torch's operators"


def choose(device: str, dtype: str, head_size: int, *, has_cap: bool = False) -> Kernel:
    """Returns the kernel for heads of a size; a cap of the scores is known to flash-attn alone.

    `device` is a type of torch.device, `dtype` ends with the name of a torch.dtype.
    """
    if device != "cuda" or dtype.endswith("float32") or head_size > _MOST_OF_HEAD:
        return Kernel.PADDED
    if not has_cap:
        return Kernel.TORCH
    return Kernel.FLASH_ATTN if HAS_FLASH_ATTN else Kernel.PADDED
