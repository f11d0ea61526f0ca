"""The trainer's end of a publication: gather, pack, broadcast and hash, bucket by bucket."""

import time
from dataclasses import dataclass

import torch

from services.common.errors import PreconditionFailed, Reason
from services.common.weights.digest import WeightDigest
from services.common.weights.group import WeightGroup
from services.common.weights.plan import NamedTensors, Plan, pack

# Buckets in flight: one is sent while the next is gathered and packed.
_DEPTH = 2


@dataclass(frozen=True)
class Publication:
    """What was sent."""

    digest: str
    num_bytes: int
    duration_s: float


def send(group: WeightGroup, plan: Plan, weights: NamedTensors, *, version: int) -> Publication:
    """Broadcasts `weights` to the group and waits until every member has loaded the same content.

    Raises:
        Aborted: A member failed, left or was too slow.
        PreconditionFailed: A member received other bytes than were sent.
    """
    begin = time.perf_counter()
    digest = WeightDigest(plan.digest, group.device)
    in_flight: list[tuple[torch.Tensor, torch.distributed.Work]] = []
    for bucket, flat in pack(plan, weights, group.device):
        digest.update(flat, start=bucket.start)
        in_flight.append((flat, group.broadcast(flat)))
        if len(in_flight) >= _DEPTH:
            group.wait(in_flight.pop(0)[1])
    for _, work in in_flight:
        group.wait(work)
    content = digest.hexdigest()
    received = group.acknowledged(version)
    if any(other != content for other in received):
        raise PreconditionFailed(
            f"sent weights {content}, members received {received}", reason=Reason.DIGEST_MISMATCH, sent=content
        )
    return Publication(content, plan.num_bytes, time.perf_counter() - begin)
