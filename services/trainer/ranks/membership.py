"""Joins a trainer rank to an epoch of the weight group, with the transport that the epoch's message names."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from lockstep.types.v1 import types_pb2

from services.common.errors import Aborted, LockstepError
from services.common.weights.group import WeightGroup
from services.common.weights.pairs.members import BACKEND as PAIRS
from services.common.weights.pairs.sender import PairSender
from services.trainer.ranks.publish import SendingMember


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
