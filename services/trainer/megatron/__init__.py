"""Trains models with Megatron-Core, in any combination of its forms of parallelism.

These are tensor, sequence, pipeline, context, expert and data parallelism.

Import this package before megatron itself: it makes Megatron-Core run on CPU if there is no GPU.
"""

import services.trainer.compat.megatron  # noqa: F401  makes Megatron-Core run on CPU
