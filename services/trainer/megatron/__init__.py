"""The Megatron-Core backend: tensor, sequence, pipeline, context, expert and data parallelism in any combination.

Importing this package, before megatron itself, makes Megatron-Core run on CPU where there is no GPU.
"""

import os

import services.trainer.compat.megatron  # noqa: F401  makes Megatron-Core run on CPU

# TransformerEngine's one kernel for the products of all experts, on Hopper. Without it each is launched by itself, and
# the processor that launches them is what a step waits for.
os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
