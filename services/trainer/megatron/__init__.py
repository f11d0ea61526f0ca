"""Trains models with Megatron-Core, in any combination of its forms of parallelism.

These are tensor, sequence, pipeline, context, expert and data parallelism.

Import this package before megatron itself: it makes Megatron-Core run on CPU if there is no GPU.
"""

import os

import services.trainer.compat.megatron  # noqa: F401  makes Megatron-Core run on CPU

# On Hopper this lets TransformerEngine compute all experts with one grouped GEMM. Without it the CPU launches one GEMM
# per expert, and the GPU waits for the CPU.
os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
