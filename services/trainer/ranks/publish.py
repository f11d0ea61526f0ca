"""Sends a publication from the trainer: gathers, packs, broadcasts and hashes the weights, bucket by bucket.

Several members can share the sending. Each gathers and packs its next bucket while its previous one and the buckets of
the others are in flight. The broadcasts run one after the other, because each takes the whole link into every engine.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from lockstep.types.v1 import types_pb2

from services.common.errors import Aborted, LockstepError, PreconditionFailed, Reason
from services.common.weights.buckets import Cost, Items, Sums, WeightDigest, follow, pack, pack_rounds
from services.common.weights.group import Transfer, WeightGroup
from services.common.weights.pairs import PAIRS, PairSender
from services.common.weights.plan import Bucket, NamedTensors, Plan

SendingMember = WeightGroup | PairSender


@dataclass(frozen=True)
class Publication:
    """A finished publication, as one sender saw it."""

    digest: str
    """The digest of everything that all senders sent. Only the first sender has it; it is empty on the others."""
    num_bytes: int
    duration_s: float
    base_sums: Sums | None
    """The hash sums of the base, if the plan has an adapter beside it."""
    cost: dict[str, float]


def send(
    group: SendingMember, plan: Plan, weights: Items | Iterable[Items], *, version: int, base_sums: Sums | None = None
) -> Publication:
    """Broadcasts this sender's part of the weights to the group.

    The first sender waits until every member has confirmed that it has the same content.

    Args:
        group: The members of the epoch.
        plan: The order, buckets and senders of the weights.
        weights: All weights of the plan; or, if it has several senders, this sender's weights of each round; or, with
            `base_sums`, only the adapter's.
        version: The policy version that is published.
        base_sums: The hash sums of the base, if every member holds that base already.

    Raises:
        Aborted: A member failed, left or was too slow.
        PreconditionFailed: A member received different bytes than were sent.
    """
    begin, cost = time.perf_counter(), Cost(group.device)
    skips_base = base_sums is not None
    digest = WeightDigest(plan.digest, group.device, base_sums or (0, 0))
    most = 2 * plan.num_senders  # in flight at once: two rounds
    in_flight: deque[tuple[Transfer, bool]] = deque()  # each with whether it is this sender's own
    group.begin(plan.buckets[plan.first_bucket(skips_base=skips_base) :])
    packed = _packed(group, plan, weights, skips_base=skips_base)
    for bucket, flat in packed:
        if plan.has_adapter and bucket is plan.buckets[plan.num_base_buckets]:
            base_sums = digest.sums()
        if flat is None:  # another sender's: broadcasts are relayed by the members, so each must take part
            in_flight.append((group.pass_on(bucket.num_bytes, bucket.sender), False))
        else:
            with cost.hashing():
                digest.update(flat, start=bucket.start)
            in_flight.append((group.broadcast(flat, bucket.sender), True))
        # One of this sender's buckets stays in flight while the next is packed. All have arrived before `weights` is
        # exhausted, because its end may free the memory that they are sent from.
        is_last = bucket is plan.buckets[-1]
        while in_flight and (is_last or len(in_flight) > most or sum(is_own for _, is_own in in_flight) > 1):
            group.wait(in_flight.popleft()[0])
    content = _conclude(group, plan, digest, version)
    num_bytes = plan.num_bytes_sent(skips_base=skips_base)
    return Publication(content, num_bytes, time.perf_counter() - begin, base_sums, cost.measured())


def _packed(
    group: SendingMember, plan: Plan, weights: Items | Iterable[Items], *, skips_base: bool
) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
    """Yields every bucket, with its bytes if this member sends it."""
    if plan.num_senders > 1:
        rounds = cast(Iterable[Items], weights)
        return pack_rounds(plan, rounds, group.device, sender=group.sender)
    if group.sender != 0:
        return follow(plan, cast(NamedTensors, weights), skips_base=skips_base)
    return pack(plan, cast(Items, weights), group.device, skips_base=skips_base, buffer=group.buffer)


def _conclude(group: SendingMember, plan: Plan, digest: WeightDigest, version: int) -> str:
    """Exchanges the senders' digests. Returns the digest of all parts on the first sender, and "" on the others.

    Raises:
        PreconditionFailed: A receiver's digest is different.
    """
    if group.rank > 0:
        group.acknowledge(version, " ".join(map(str, digest.sums())))
        return ""
    answers = group.acknowledged(version)
    # In the order of ranks: the trainer's other members, with the sums of their parts, then the engine workers.
    num_others = (group.num_trainer_ranks or plan.num_senders) - 1
    parts, received = answers[:num_others], answers[num_others:]
    for part in parts:
        first, second = map(int, part.split())
        digest.add((first, second))
    content = digest.hexdigest()
    if any(other != content for other in received):
        raise PreconditionFailed(
            f"the trainer sent weights {content}, but members received {received}",
            reason=Reason.DIGEST_MISMATCH,
            sent=content,
        )
    return content


def join_epoch(
    group: types_pb2.WeightGroup, *, rank: int, senders: Sequence[int], device: torch.device
) -> SendingMember | None:
    """Returns this rank's membership, or None if the rank is no member. `senders` lists the plan's senders.

    Raises:
        Aborted: A member did not join.
    """
    if group.backend == PAIRS:
        return _join_pairs(group, rank, senders, device)
    return WeightGroup(group, rank=senders.index(rank), device=device) if rank in senders else None


def _join_pairs(group: types_pb2.WeightGroup, rank: int, senders: Sequence[int], device: torch.device) -> PairSender:
    """Joins all ranks or none, because a publication has collectives of all ranks."""

    def spread(flat: torch.Tensor, sender: int) -> None:
        if dist.get_world_size() > 1:
            dist.broadcast(flat, src=senders[sender])

    member: PairSender | None = None
    failure: LockstepError | None = None
    try:
        member = PairSender(group, rank=rank, device=device, senders=senders, spread=spread)
    except LockstepError as error:
        failure = error
    num_joined = torch.tensor([int(member is not None)], device=device)
    dist.all_reduce(num_joined)
    if member is not None and int(num_joined) == dist.get_world_size():
        return member
    if member is not None:
        member.kill()
        member.abort()
    raise failure or Aborted(f"epoch {group.epoch}: another trainer rank could not join", epoch=group.epoch)
