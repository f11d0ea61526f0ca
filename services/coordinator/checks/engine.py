"""Estimates the memory of an engine's worker, for plans of hosts that trainer and engines share."""

from services.common.config.run import Config
from services.common.families.architecture import Architecture

_UTILIZATION = 0.92  # vLLM's default of gpu_memory_utilization
_CPU_CACHE_BYTES = 1 << 28  # as services.rollout.engine sets kv_cache_memory_bytes on CPU


def weights_of_engine(config: Config, model: Architecture, *, is_gpu: bool) -> int:
    """Returns the bytes of the weights that each of an engine's tensor-parallel workers holds."""
    dtype = config.rollout.dtype
    size = 2 if dtype == "bfloat16" or (dtype == "auto" and is_gpu) else 4
    return size * model.num_parameters // config.rollout.tensor_parallel_size


def engine_resident(config: Config, model: Architecture, *, device_bytes: int | None = None) -> int:
    """Returns the bytes that a worker holds while it serves: weights and KV cache, without its process.

    On a GPU of `device_bytes` vLLM takes the share `gpu_memory_utilization` of it, unless the size of the cache is
    given; None is for CPU.
    """
    engine, is_gpu = config.rollout.engine, device_bytes is not None
    weights, cache = weights_of_engine(config, model, is_gpu=is_gpu), engine.get("kv_cache_memory_bytes")
    if cache is not None:
        return weights + int(cache)
    if device_bytes is None:
        return weights + _CPU_CACHE_BYTES
    return int(device_bytes * float(engine.get("gpu_memory_utilization", _UTILIZATION)))
