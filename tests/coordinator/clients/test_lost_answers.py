"""Tests groups whose answer was lost while their replica still serves."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from lockstep.rollout.v1 import rollout_pb2 as pb

from services.common.errors import InternalError, Reason, Unavailable
from tests.coordinator.clients.test_rollout_client import STAMP, generate, serving
from tests.coordinator.fake_services import FakeReplica, replicas
from tests.support import raises


class Mute(FakeReplica):
    """Ends the stream of an answer before the group."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for answer in ():
            yield answer


async def test_a_replica_that_answers_nothing_is_not_asked_again():
    async with replicas(1, Mute) as fakes, serving(fakes) as rollout:
        with pytest.raises(InternalError, match="incomplete group"):
            await generate(rollout, 0)
        assert rollout.num_redispatched == 0


class Serves(FakeReplica):
    """Says which weights it serves."""

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        answer = await super().GetInfo(request, context)
        answer.stamp.CopyFrom(STAMP)
        return answer


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_an_only_replica_outlives_one_lost_connection_of_a_group(num_lost: int):
    async with replicas(1, Serves) as (fake,), serving([fake]) as rollout:
        fake.error["Generate"], fake.failures_left = Unavailable("reset", reason=Reason.UNREACHABLE), num_lost
        if num_lost == 1:
            assert (await generate(rollout, 0)).index == 0
            assert (rollout.num_redispatched, fake.num_opens) == (1, 1)
        else:
            with raises(Unavailable, reason=Reason.NO_REPLICA):
                await generate(rollout, 0)
