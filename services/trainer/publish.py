"""The trainer's end of a publication: gather, pack, broadcast and hash, bucket by bucket."""

import time
from dataclasses import dataclass

import torch

from services.common.errors import PreconditionFailed, Reason
from services.common.weights.cost import Cost
from services.common.weights.digest import Sums, WeightDigest
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
    base_sums: Sums | None
    """Of the base, if the plan has an adapter beside it."""
    cost: dict[str, float]


def send(
    group: WeightGroup, plan: Plan, weights: NamedTensors, *, version: int, base_sums: Sums | None = None
) -> Publication:
    """Broadcasts `weights` to the group and waits until every member has loaded the same content.

    With `base_sums` every member holds the base that has them, and `weights` are the adapter's only.

    Raises:
        Aborted: A member failed, left or was too slow.
        PreconditionFailed: A member received other bytes than were sent.
    """
    begin, cost = time.perf_counter(), Cost(group.device)
    skips_base = base_sums is not None
    digest = WeightDigest(plan.digest, group.device, base_sums or (0, 0))
    in_flight: list[tuple[torch.Tensor, torch.distributed.Work]] = []
    for bucket, flat in pack(plan, weights, group.device, skips_base=skips_base):
        if plan.has_adapter and bucket is plan.buckets[plan.num_base_buckets]:
            base_sums = digest.sums()
        with cost.hashing():
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
    num_bytes = plan.num_bytes_sent(skips_base=skips_base)
    return Publication(content, num_bytes, time.perf_counter() - begin, base_sums, cost.measured())
