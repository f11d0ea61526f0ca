"""Assigns this host's GPUs to the services started here: first to the trainers' ranks, then to each replica.

If the run is colocated, each replica gets those of some of the trainer's ranks.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from services.common.config.reading.any import AnyConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput

_DEVICES = Path("/dev")


def visible_gpus() -> list[str]:
    """Returns the GPUs named in CUDA_VISIBLE_DEVICES or, if it is unset, all NVIDIA GPUs of this host.

    Loads no driver library.

    Raises:
        InvalidInput: It names a GPU that does not exist, or one twice. CUDA would silently use fewer GPUs, or none.
    """
    found = sum(path.name.removeprefix("nvidia").isdecimal() for path in _DEVICES.glob("nvidia*"))
    every = [str(index) for index in range(found)]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).replace(" ", "")
    names = [] if named in ("", "-1") or not found else named.split(",")
    wrong = [name for name in names if not (name in every or name.startswith(("GPU-", "MIG-")))]
    if wrong or len(set(names)) < len(names):
        raise InvalidInput(
            f"CUDA_VISIBLE_DEVICES={named}: this host has {found} GPUs, numbered from 0; name each once, or unset it",
            field="CUDA_VISIBLE_DEVICES",
        )
    return names


def split_gpus(
    ranks: dict[str, int], config: AnyConfig, *, available: Sequence[str], start_rollout: bool
) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES by service name; empty if the host has no GPU.

    Args:
        ranks: Number of ranks of each trainer that is started here.
        config: The run's config.
        available: This host's GPUs, as `visible_gpus` returns them.
        start_rollout: Whether the rollout replicas are started here.

    Raises:
        InvalidInput: The host has GPUs, but fewer than the services need.
    """
    if not available:
        return {}
    if isinstance(config, Config) and config.placement == "colocated" and start_rollout:
        return _shared_gpus(config, available)
    wanted = dict(ranks)
    if start_rollout and isinstance(config, Config):
        replica = config.rollout.tensor_parallel_size
        wanted |= {f"rollout-{index}": replica for index in range(config.rollout.num_replicas)}
    total = sum(wanted.values())
    if total > len(available):
        raise InvalidInput(
            f"this host has {len(available)} usable GPUs, but the trainers' num_ranks and rollout.num_replicas x "
            f"tensor_parallel_size need {total}; lower them, or give the addresses of services on other hosts",
            field="trainer.num_ranks",
        )
    devices = iter(available)
    return {name: ",".join(next(devices) for _ in range(count)) for name, count in wanted.items()}


def _shared_gpus(config: Config, available: Sequence[str]) -> dict[str, str]:
    """Returns the same GPUs for the trainer's ranks and, in their order, for the workers of the replicas."""
    num_ranks, num_replicas = config.trainer.num_ranks, config.rollout.num_replicas
    if num_ranks > len(available):
        raise InvalidInput(
            f"this host has {len(available)} usable GPUs, but trainer.num_ranks, which colocated engines share, is "
            f"{num_ranks}; lower it",
            field="trainer.num_ranks",
        )
    size = num_ranks // num_replicas
    shares = {f"rollout-{index}": available[index * size : (index + 1) * size] for index in range(num_replicas)}
    return {name: ",".join(gpus) for name, gpus in {"trainer": available[:num_ranks], **shares}.items()}
