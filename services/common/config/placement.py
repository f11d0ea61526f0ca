"""Checks that trainer and engines go together: on shared GPUs, where every rank has exactly one engine worker, and if
the engines compute in float8."""

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from services.common.config.base import Seconds, Strict
from services.common.config.rollout import RolloutConfig
from services.common.config.trainer import TrainerConfig

Placement = Literal["disaggregated", "colocated"]

SHARED_UTILIZATION = 0.8
"""gpu_memory_utilization of an engine that can sleep; vLLM's own default, 0.92, leaves no room for a second process."""

BUCKET_BYTES: Mapping[Placement, int] = {"disaggregated": 512 << 20, "colocated": 1280 << 20}
"""Default of weights.bucket_bytes. On a shared GPU the two processes take turns, bucket by bucket, and each turn costs
more than packing and loading can gain by overlap."""

# What turns on CUDA graphs in Megatron.
_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")


def check_placement(trainer: TrainerConfig, rollout: RolloutConfig, deployments: Mapping[str, str]) -> None:
    """Raises ValueError if the placement cannot be colocated. `deployments` has those of the other models."""
    for name, deployment in deployments.items():
        if deployment == "own":
            raise ValueError(
                f"{name}.deployment own needs GPUs of its own, but placement colocated has only those that trainer and "
                f"engines share: set {name}.deployment shared, or placement disaggregated"
            )
    if rollout.can_sleep and trainer.lag.versions:
        raise ValueError(
            f"trainer.lag.versions {trainer.lag.versions} lets trainer and engines work at the same time, which "
            "they cannot with placement colocated: set trainer.lag.versions 0, placement disaggregated, or, if both "
            "fit on the GPU, rollout.engine.enable_sleep_mode false"
        )
    if rollout.discovery:
        raise ValueError(
            "rollout.discovery lets replicas come and go, but with placement colocated each shares GPUs with the "
            "trainer's ranks: leave it out, or set placement disaggregated"
        )
    if not rollout.can_sleep and "gpu_memory_utilization" not in rollout.engine:
        raise ValueError(
            "rollout.engine.enable_sleep_mode false: with placement colocated the engine keeps its memory while the "
            "trainer works; set rollout.engine.gpu_memory_utilization to a share that leaves the trainer enough"
        )
    graphs = trainer.megatron.transformer_config_kwargs
    if on := [key for key in _GRAPHS if graphs.get(key, "none") not in (False, None, "none")]:
        raise ValueError(
            f"trainer.megatron.transformer_config_kwargs.{on[0]}: a CUDA graph reads weights where they were when it "
            "was captured, and with placement colocated they are elsewhere after every release; leave it out"
        )
    sizes = {"rollout.num_replicas": rollout.num_replicas, **rollout.parallel_sizes}
    num_workers = math.prod(sizes.values())
    if num_workers != trainer.num_ranks:
        product = " x ".join(f"{key} {size}" for key, size in sizes.items())
        raise ValueError(
            f"placement colocated needs one engine worker for each trainer rank, but trainer.num_ranks is "
            f"{trainer.num_ranks} and there are {num_workers} workers ({product}); make them equal"
        )


def check_precision(trainer: TrainerConfig, rollout: RolloutConfig) -> None:
    """Raises ValueError if samples of an engine that computes in float8 would be taken for the policy's own."""
    key = rollout.quantized_key
    if key and not trainer.loss.corrects_engine:
        raise ValueError(
            f"rollout.{key} fp8: the engine samples from another distribution than the trainer's, and the loss does "
            "not correct for it: set trainer.loss.correction.weight token (TIS) or trainer.loss.correction.token_mask "
            f"(IcePop), or leave rollout.{key} out"
        )
    if key and trainer.lora.published_rank:
        raise ValueError(
            f"rollout.{key} fp8 with trainer.lora.publish adapter: a quantized base with adapters was not compared "
            "with the trainer; set trainer.lora.publish merged"
        )


class RestartConfig(Strict):
    """How often a service that the coordinator started is restarted after it died."""

    max: int = Field(default=3, ge=0)
    """Maximum number of restarts within window_s of each service that was started with the run. If the service dies
    once more, the run ends with SERVICE_DIED. 0 never restarts a service. After a trainer's death the run resumes by
    itself from its newest checkpoint and the recorded batches, unless the trainer died while it loaded the model."""
    window_s: Seconds = 3600.0
    """Length in seconds of the period in which deaths are counted. Earlier ones are forgotten."""
