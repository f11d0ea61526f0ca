"""Batches of earlier weights, over fake workers: the trainer compares what their samples name with its publications."""

import json
from typing import Any

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import BlockCutter, blocks_of
from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.coordinator.clients.trainer import BlockStream, whole_batch
from tests.support import PATIENCE_S, make_batch, raises
from tests.trainer.ranks.crew import DIGEST, Service


def stamp(version: int, digest: str = DIGEST) -> PolicyStamp:
    return PolicyStamp(version=version, digest=digest)


def header(version: int, drawn: PolicyStamp | None, **more: Any) -> pb.TrainHeader:
    fields = {"batch_id": f"r/{version}", "temperature": 1.0, "role": pb.ROLE_POLICY, **more}
    return pb.TrainHeader(expected_stamp=stamp(version), drawn_stamp=drawn, **fields)


async def train(service: Service, version: int, sampled: PolicyStamp, drawn: PolicyStamp | None) -> int:
    """Trains the trainer, which holds version `version`, on samples of `sampled`; the header names `drawn`."""
    requests = whole_batch(header(version, drawn), make_batch(2, 2, sampled))
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


async def refused(service: Service, version: int, sampled: PolicyStamp, drawn: PolicyStamp | None) -> LockstepError:
    with pytest.raises(LockstepError) as caught:
        await train(service, version, sampled, drawn)
    assert await service.version() == version
    return caught.value


@pytest.mark.parametrize("lag", [1, 2])
async def test_samples_may_be_as_many_versions_old_as_the_lag(service: Service, lag: int) -> None:
    await open_lagged(service, lag)
    for version in range(lag + 3):
        drawn = stamp(max(version - lag, 0))
        assert await train(service, version, drawn, drawn) == version + 1
        await publish(service, version + 1)
    version = lag + 3
    error = await refused(service, version, stamp(version - lag - 1), stamp(version - lag - 1))
    assert (type(error), error.reason) == (PreconditionFailed, Reason.TOO_STALE)
    assert await train(service, version, stamp(version), None) == version + 1


async def test_a_stream_of_blocks_is_compared_in_the_same_way(service: Service) -> None:
    await open_lagged(service, 1)
    for version, drawn in enumerate((stamp(0), stamp(0), stamp(0))):
        batch = make_batch(2, 2, drawn)
        stream = BlockStream(
            header(version, drawn, tokens_per_block=1),
            lambda requests: service.client.call(TrainerService.Train, requests, timeout_s=PATIENCE_S),
        )
        for block in blocks_of(batch, BlockCutter(1)):
            stream.send(block)
        stream.commit(batch)
        if version < 2:
            assert (await stream.run())[0] == version + 1
            await publish(service, version + 1)
            continue
        with raises(PreconditionFailed, reason=Reason.TOO_STALE):
            await stream.run()
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
