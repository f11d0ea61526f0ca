"""Holds what the trainer uses inside Megatron-Core, seen with 0.16.1.

Importing this package, before megatron itself, makes Megatron-Core run on CPU where there is no GPU.

    cpu_shim          megatron.core.* on CPU: what it asks of torch.cuda
    cpu_modules       norm and attention on CPU, in the place of TransformerEngine's
    context_parallel  how sequences are cut for context parallelism
    groups            the globals that hold the process groups
    model             what a model's chunks are given and taken
    optimizer         the state of the distributed and of the hybrid optimizer
    checkpoint        sharded tensors as torch's distributed checkpoint wants them
"""

from services.common.compat.versions import require_version
from services.trainer.compat.megatron.cpu_shim import install

require_version("megatron-core")
install()
