"""Estimates for `lockstep plan`: memory of a GPU that a trainer rank and an engine worker share, in each phase.

Contexts, CUDA graphs and the kernels' own memory, which both processes keep all the time, are not counted. Outside of
publications, the buffers of a pair, which are kept if they are small (services.common.weights.pairs.buffers), are not
counted either.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.common.config.placement import SHARED_UTILIZATION
from services.common.config.run import Config
from services.common.families.architecture import Architecture
from services.coordinator.checks.activations import weight_bytes
from services.coordinator.checks.memory import Memory

_NUM_BUFFERS = 2  # of a pair (services.common.weights.pairs)
_DEFAULT_UTILIZATION = 0.92  # vLLM's own, of an engine that has its GPU for itself


@dataclass(frozen=True)
class Phase:
    """Holds the bytes of one GPU in one phase. `engine` does not count the KV cache."""

    name: str
    trainer: int
    engine: int

    @property
    def total(self) -> int:
        """Returns the bytes of both."""
        return self.trainer + self.engine


def colocated_phases(config: Config, model: Architecture, ranks: Collection[Memory]) -> list[Phase]:
    """Returns the phases of a step; `ranks` has the memory of each kind of rank, and the largest counts."""
    weights = max(rank.weights for rank in ranks)
    engine = engine_weights(config, model)
    return [
        Phase("generate", 0, engine),
        Phase("train", max(rank.phases[name] for rank in ranks for name in ("forward", "backward", "optimizer")), 0),
        Phase("publish", weights + _NUM_BUFFERS * buffer_bytes(config, model), engine),
    ]


def host_bytes(ranks: Collection[Memory]) -> int:
    """Returns the pinned host memory of a rank while the engine has the GPU; gradients are dropped."""
    return max(rank.weights + rank.optimizer + rank.reference for rank in ranks)


def buffer_bytes(config: Config, model: Architecture) -> int:
    """Returns the bytes of a publication's largest bucket."""
    sizes = [size * weight_bytes(config.trainer, is_gpu=True) for size in model.tensor_sizes()]
    return min(sum(sizes), max(config.bucket_bytes, *sizes))


def engine_weights(config: Config, model: Architecture) -> int:
    """Returns the bytes of an engine worker's weights."""
    size = 4 if config.rollout.dtype == "float32" else 2
    return size * model.num_parameters // _workers_per_copy(config)


def utilization(config: Config) -> float:
    """Returns the share of its GPU that an engine takes, for weights and KV cache."""
    default = SHARED_UTILIZATION if config.placement == "colocated" else _DEFAULT_UTILIZATION
    return float(config.rollout.engine.get("gpu_memory_utilization", default))


def cache_token_bytes(config: Config, model: Architecture) -> int:
    """Returns the bytes of the KV cache that a token takes on a worker, in bfloat16."""
    return 2 * 2 * model.num_layers * model.key_value_size // _workers_per_copy(config)


def _workers_per_copy(config: Config) -> int:
    stages = config.rollout.engine.get("pipeline_parallel_size", 1)
    return config.rollout.tensor_parallel_size * (stages if isinstance(stages, int) else 1)
