"""Batches of earlier weights, over fake workers: the trainer compares what their samples name with its publications."""

import json
from typing import Any

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches.blocks import BlockCutter, blocks_of
from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.coordinator.clients.trainer import BlockStream, whole_batch
from tests.support import PATIENCE_S, make_batch
from tests.trainer.ranks.crew import DIGEST, Service


def stamp(version: int, digest: str = DIGEST) -> PolicyStamp:
    return PolicyStamp(version=version, digest=digest)


def header(held: int, drawn: PolicyStamp | None, **more: Any) -> pb.TrainHeader:
    fields = {"batch_id": f"r/{held}", "temperature": 1.0, "role": pb.ROLE_POLICY, **more}
    return pb.TrainHeader(expected_stamp=stamp(held), drawn_stamp=drawn, **fields)


async def train(service: Service, held: int, sampled: PolicyStamp, drawn: PolicyStamp | None) -> int:
    """Trains the trainer, which holds version `held`, on samples of `sampled`; the header names `drawn`."""
    requests = whole_batch(header(held, drawn), make_batch(2, 2, sampled))
    return (await service.client.call(TrainerService.Train, requests, timeout_s=PATIENCE_S)).version


async def publish(service: Service, version: int) -> None:
    request = pb.SendWeightsRequest(epoch=1, version=version)
    await service.client.call(TrainerService.SendWeights, request, timeout_s=PATIENCE_S)


async def open_lagged(service: Service, versions: int) -> None:
    config = {"lag": {"versions": versions}, "loss": {"old_logprobs": "engine"}} if versions else {}
    await service.open("lagged", config_json=json.dumps(config))
    join = pb.JoinWeightGroupRequest()
    join.group.epoch = 1
    await service.client.call(TrainerService.JoinWeightGroup, join, timeout_s=PATIENCE_S)
    await publish(service, 0)


async def refused(service: Service, held: int, sampled: PolicyStamp, drawn: PolicyStamp | None) -> LockstepError:
    with pytest.raises(LockstepError) as caught:
        await train(service, held, sampled, drawn)
    assert await service.version() == held
    return caught.value


@pytest.mark.parametrize("lag", [1, 2])
async def test_samples_may_be_as_many_versions_old_as_the_lag(service: Service, lag: int) -> None:
    await open_lagged(service, lag)
    for held in range(lag + 3):
        drawn = stamp(max(held - lag, 0))
        assert await train(service, held, drawn, drawn) == held + 1
        await publish(service, held + 1)
    held = lag + 3
    error = await refused(service, held, stamp(held - lag - 1), stamp(held - lag - 1))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.TOO_STALE)
    assert await train(service, held, stamp(held), None) == held + 1


async def test_a_stream_of_blocks_is_compared_in_the_same_way(service: Service) -> None:
    await open_lagged(service, 1)
    for held, drawn in enumerate((stamp(0), stamp(0), stamp(0))):
        batch = make_batch(2, 2, drawn)
        stream = BlockStream(
            header(held, drawn, tokens_per_block=1),
            lambda requests: service.client.call(TrainerService.Train, requests, timeout_s=PATIENCE_S),
        )
        for block in blocks_of(batch, BlockCutter(1)):
            stream.send(block)
        stream.commit(batch)
        if held < 2:
            assert (await stream.run())[0] == held + 1
            await publish(service, held + 1)
            continue
        with pytest.raises(PreconditionFailed) as caught:
            await stream.run()
        assert caught.value.reason is Reason.TOO_STALE
    assert await service.version() == 2


async def test_what_the_samples_name_is_what_the_header_and_the_trainer_name(service: Service) -> None:
    await open_lagged(service, 1)
    await train(service, 0, stamp(0), stamp(0))
    await publish(service, 1)
    # The header names a publication, and one sample or all come from others.
    assert (await refused(service, 1, stamp(1), stamp(0))).reason is Reason.FUTURE_STAMP
    assert (await refused(service, 1, stamp(0), stamp(1))).reason is Reason.STALE_STAMP
    assert (await refused(service, 1, stamp(0), None)).reason is Reason.STALE_STAMP
    assert (await refused(service, 1, stamp(0, "f" * 32), stamp(0))).reason is Reason.DIGEST_MISMATCH
    # The header names what this trainer did not publish.
    other = stamp(0, "f" * 32)
    assert (await refused(service, 1, other, other)).reason is Reason.DIGEST_MISMATCH
    assert (await refused(service, 1, stamp(2), stamp(2))).reason is Reason.UNPUBLISHED
    assert await train(service, 1, stamp(0), stamp(0)) == 2


async def test_without_a_lag_no_earlier_version_is_accepted(service: Service) -> None:
    await open_lagged(service, 0)
    await train(service, 0, stamp(0), None)
    await publish(service, 1)
    assert (await refused(service, 1, stamp(0), stamp(0))).reason is Reason.TOO_STALE
    assert await train(service, 1, stamp(1), None) == 2
