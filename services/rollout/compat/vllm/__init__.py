"""Holds what this service uses inside vLLM, seen with vLLM 0.26.0 (CUDA) and 0.32.0 (CPU).

It has several modules so that no process imports more of vLLM than it uses:

    engine_fork   the service, on CPU: engines as forks of a process that has imported vLLM
    client        the service: what AsyncLLM has no public method for
    scheduler     the engine: tokens sent 32 at a time
    worker        the engine's workers: what a worker extension finds in the worker that it is mixed into
    reload        the engine's workers: layerwise reload of a live model's weights
"""

from services.common.compat.versions import require_version

require_version("vllm")
