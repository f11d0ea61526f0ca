"""The Megatron-Core backend: tensor, sequence, pipeline, context, expert and data parallelism in any combination.

Importing this package, before megatron itself, makes Megatron-Core run on CPU where there is no GPU.
"""

from services.trainer.megatron.cpu.shim import install

install()
