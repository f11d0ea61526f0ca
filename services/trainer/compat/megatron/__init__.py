"""Collects the trainer's uses of Megatron-Core internals, seen with 0.16.1.

Import this package before megatron itself: it makes Megatron-Core run on CPU if there is no GPU.

    cpu_shim          replaces torch.cuda for megatron.core.* on CPU
    cpu_modules       replaces TransformerEngine's norm and attention on CPU
    context_parallel  cuts sequences for context parallelism
    groups            reads and sets the globals that hold the process groups
    random            returns the tracker of random number generators
    model             changes a model's chunks and frees them
    router            makes the routers of layers of experts use given experts
    optimizer         makes and sets the state of the distributed and the hybrid optimizer
    checkpoint        converts sharded tensors for torch's distributed checkpoint
"""

from services.common.compat.versions import require_version
from services.trainer.compat.megatron.cpu_shim import install

require_version("megatron-core")
install()
