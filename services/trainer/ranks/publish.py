"""The trainer's end of a publication: gather, pack, broadcast and hash, bucket by bucket.

Several members can share the sending. Each gathers and packs the next of its own buckets while its last and those of
the others are on their way. The broadcasts themselves follow one another: each of them takes the whole link into every
engine.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from services.common.errors import PreconditionFailed, Reason
from services.common.weights.cost import Cost
from services.common.weights.digest import Sums, WeightDigest
from services.common.weights.group import Transfer, WeightGroup
from services.common.weights.plan import NamedTensors, Plan, pack, pack_rounds


@dataclass(frozen=True)
class Publication:
    """What was sent, as far as this sender is concerned."""

    digest: str
    """Of all that was sent; empty on all senders but the first."""
    num_bytes: int
    duration_s: float
    base_sums: Sums | None
    """Of the base, if the plan has an adapter beside it."""
    cost: dict[str, float]


def send(
    group: WeightGroup,
    plan: Plan,
    weights: NamedTensors | Iterable[NamedTensors],
    *,
    version: int,
    base_sums: Sums | None = None,
) -> Publication:
    """Broadcasts this sender's part of `weights` to the group; the first sender waits until all have the same content.

    `weights` is all of the plan, or, if it has several senders, this one's of each round. With `base_sums` every member
    holds the base that has them, and `weights` are the adapter's only.

    Raises:
        Aborted: A member failed, left or was too slow.
        PreconditionFailed: A member received other bytes than were sent.
    """
    begin, cost = time.perf_counter(), Cost(group.device)
    skips_base = base_sums is not None
    digest = WeightDigest(plan.digest, group.device, base_sums or (0, 0))
    most = 2 * plan.num_senders  # on their way: two rounds
    in_flight: deque[tuple[Transfer, bool]] = deque()  # and whether it is this sender's own
    packed = (
        pack_rounds(plan, cast(Iterable[NamedTensors], weights), group.device, sender=group.rank)
        if plan.num_senders > 1
        else pack(plan, cast(NamedTensors, weights), group.device, skips_base=skips_base)
    )
    for bucket, flat in packed:
        if plan.has_adapter and bucket is plan.buckets[plan.num_base_buckets]:
            base_sums = digest.sums()
        if flat is None:  # a broadcast passes through its members; none of them can leave it out
            in_flight.append((group.pass_on(bucket.num_bytes, bucket.sender), False))
        else:
            with cost.hashing():
                digest.update(flat, start=bucket.start)
            in_flight.append((group.broadcast(flat, bucket.sender), True))
        # One of its own stays on its way while the next is packed. All have arrived before `weights` ends, whose end
        # may free what they are sent from.
        is_last = bucket is plan.buckets[-1]
        while in_flight and (is_last or len(in_flight) > most or sum(is_own for _, is_own in in_flight) > 1):
            group.wait(in_flight.popleft()[0])
    content = _conclude(group, plan, digest, version)
    num_bytes = plan.num_bytes_sent(skips_base=skips_base)
    return Publication(content, num_bytes, time.perf_counter() - begin, base_sums, cost.measured())


def _conclude(group: WeightGroup, plan: Plan, digest: WeightDigest, version: int) -> str:
    """On the first sender, the digest of all senders' parts, which every receiver must have too."""
    if group.rank > 0:
        group.acknowledge(version, " ".join(map(str, digest.sums())))
        return ""
    answers = group.acknowledged(version)
    parts, received = answers[: plan.num_senders - 1], answers[plan.num_senders - 1 :]
    for part in parts:
        first, second = map(int, part.split())
        digest.add((first, second))
    content = digest.hexdigest()
    if any(other != content for other in received):
        raise PreconditionFailed(
            f"sent weights {content}, members received {received}", reason=Reason.DIGEST_MISMATCH, sent=content
        )
    return content
