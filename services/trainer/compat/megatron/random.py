"""Reads Megatron's random number generators.

Reason: Megatron keeps their tracker in a global that is None until the first use, and its function for it has no
return type. Seen with Megatron-Core 0.16.1.
"""

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker


def rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker of this process, which forks into each rank's own generator."""
    tracker = get_cuda_rng_tracker()
    assert isinstance(tracker, CudaRNGStatesTracker), f"Megatron-Core made another tracker: {type(tracker)}"
    return tracker
