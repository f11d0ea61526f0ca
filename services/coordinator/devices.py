"""Which GPUs of this host each started service gets: the trainer's ranks the first, then replica by replica."""

from pathlib import Path

from services.common.config.run import Config
from services.common.errors import InvalidInput


def num_gpus() -> int:
    """NVIDIA GPUs of this host, without loading a driver library."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


def split_gpus(ranks: dict[str, int], config: Config, *, available: int, start_rollout: bool) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by service name; empty where there is no GPU. `ranks` has the trainers that are started.

    Raises:
        InvalidInput: There are GPUs, but fewer than the services need.
    """
    if available == 0:
        return {}
    wanted = dict(ranks)
    if start_rollout:
        replica = config.rollout.tensor_parallel_size
        wanted |= {f"rollout-{index}": replica for index in range(config.rollout.num_replicas)}
    total = sum(wanted.values())
    if total > available:
        raise InvalidInput(
            f"this host has {available} GPUs, but the trainers' num_ranks and rollout.num_replicas x "
            f"tensor_parallel_size need {total}; lower them, or give the addresses of services on other hosts",
            field="trainer.num_ranks",
        )
    devices = iter(range(available))
    return {name: ",".join(str(next(devices)) for _ in range(count)) for name, count in wanted.items()}
