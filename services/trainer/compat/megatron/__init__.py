"""Collects the trainer's uses of Megatron-Core internals, seen with 0.16.1.

Import this package before megatron itself: it makes Megatron-Core run on CPU if there is no GPU.

    cpu_shim   replaces torch.cuda for megatron.core.* on CPU
    attention  cuts sequences for context parallelism; norm and attention for CPU, without TransformerEngine
    mbridge    corrects mbridge, which builds models and converts their weights; only imported where it is used
    model      changes a model's chunks, routers and dispatchers of experts, and frees chunks
    state      reads and sets globals (groups, generators) and the state of optimizers
"""

from services.common.compat import require_version
from services.trainer.compat.megatron.cpu_shim import install

require_version("megatron-core")
install()
