"""Tests a rank that cannot send its part of a publication: no other rank waits for it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from services.common.errors import Aborted, InternalError, Reason
from services.common.weights.plan import Plan
from services.common.weights.store import ServedStore
from services.trainer.backend import Role
from services.trainer.ranks.worker import Worker
from tests.common.weights.group_harness import CPU, join_all, message, receive
from tests.support import PATIENCE_S, raises

WEIGHTS = [("a", torch.zeros(4)), ("b", torch.ones(4))]
PLAN = Plan.of(WEIGHTS, bucket_bytes=1 << 10, slots=[(0, 1), (1, 1)])


class Backend:
    """Sends one tensor, whatever the plan says."""

    def __init__(self, own: tuple[str, torch.Tensor]):
        self.own = own

    def sender_slots(self, bucket_bytes: int) -> list[tuple[int, int]]:
        return [(0, 1), (1, 1)]

    def sent_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [self.own]


def sender(rank: int, own: tuple[str, torch.Tensor]) -> Worker:
    worker = Worker(None, rank, 2, CPU)
    worker._plan, worker._members = PLAN, [0, 1]
    worker._backends[Role.POLICY] = Backend(own)
    return worker


def test_the_epoch_ends_for_all_when_one_rank_has_other_weights_than_the_plan() -> None:
    group = message(ServedStore("127.0.0.1").address, epoch=1, world_size=3, timeout_s=20.0)
    whole = sender(0, WEIGHTS[0])
    other = sender(1, ("c", torch.ones(4)))
    with ThreadPoolExecutor(3) as pool:
        whole._group, other._group, engine = [joined.result(PATIENCE_S) for joined in join_all(pool, group, range(3))]
        waiting = [pool.submit(receive, engine, PLAN, 0), pool.submit(whole.send, version=0, skips_base=False)]
        with pytest.raises(InternalError, match="the plan has b"):
            other.send(version=0, skips_base=False)
        for one in waiting:
            with raises(Aborted, reason=Reason.EPOCH_ABORTED):
                one.result()
