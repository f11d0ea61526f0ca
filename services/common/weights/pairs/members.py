"""Finds the partner of each member: the trainer rank and the engine worker that are on one device."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from lockstep.types.v1 import pairs_pb2 as pb

from services.common.compat.cuda import device_uuid
from services.common.errors import InvalidInput

BACKEND = "pairs"
"""Names this transport in a WeightGroup message."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host


def device_name(device: torch.device, index: int) -> str:
    """Returns the UUID of a GPU. On CPU, returns a name of this host and of `index`, which counts ranks or workers."""
    if device.type == "cuda":
        return device_uuid(device)
    return f"{_BOOT_ID.read_text().strip()}/{index}"


def partners(members: Sequence[pb.PairMember], num_trainer_ranks: int) -> Mapping[int, int]:
    """Returns the trainer rank of every engine worker, both as ranks in the weight group.

    Raises:
        InvalidInput: A worker's device has no trainer rank, or a device has two ranks or two workers.
    """
    ranks, workers = members[:num_trainer_ranks], members[num_trainer_ranks:]
    for what, these in (("trainer ranks", ranks), ("engine workers", workers)):
        most = Counter(member.device for member in these).most_common(1)
        if most and most[0][1] > 1:
            raise InvalidInput(f"placement colocated: {most[0][1]} {what} are on device {most[0][0]}, only one may be")
    rank_on = {member.device: rank for rank, member in enumerate(ranks)}
    for index, worker in enumerate(workers):
        if worker.device not in rank_on:
            raise InvalidInput(
                f"placement colocated: engine worker {index} is on device {worker.device}, but the trainer ranks are "
                f"on {', '.join(rank_on)}: start both with the same CUDA_VISIBLE_DEVICES on one host",
                field="placement",
            )
    return {num_trainer_ranks + index: rank_on[worker.device] for index, worker in enumerate(workers)}
