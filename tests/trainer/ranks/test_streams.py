"""Tests, over fake workers, what ranks are told when a stream of blocks breaks, and who may send which blocks.

The ranks are told without any further call of the coordinator.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common import batches
from services.common.batches import BlockCutter, blocks_of
from services.common.errors import DataLoss, InternalError, InvalidInput, PreconditionFailed, Reason
from services.common.rpc.fence import new_token
from services.coordinator.clients.trainer import BlockStream
from tests.support import PATIENCE_S, make_batch, raises
from tests.trainer.ranks.crew import DIGEST, Crew, Service

STAMP = PolicyStamp(version=0, digest=DIGEST)


class Streamed:
    """Streams a batch of two blocks to a real servicer, as the coordinator does."""

    def __init__(self, service: Service, spoil: Callable[[Any], Any] = lambda message: message, **header: Any):
        fields = {"batch_id": "b", "temperature": 1.0, "role": pb.ROLE_POLICY, "tokens_per_block": 1, **header}
        self.service, self.batch = service, make_batch(2, 2, STAMP)
        self.stream = BlockStream(pb.TrainHeader(expected_stamp=STAMP, **fields), self._call)
        self._spoil = spoil
        self.answer = asyncio.create_task(self.stream.run())

    async def _call(self, requests: AsyncIterator[Any]) -> pb.TrainResponse:
        spoiled = (self._spoil(message) async for message in requests)
        return await self.service.client.call(TrainerService.Train, spoiled, timeout_s=PATIENCE_S)

    @property
    def blocks(self) -> list[pa.Table]:
        return blocks_of(self.batch, BlockCutter(1))

    async def send(self, number: int) -> None:
        """Sends a block and waits until both ranks have it."""
        for worker in self.service.crew.workers:
            worker.added.clear()
        self.stream.send(self.blocks[number])
        for worker in self.service.crew.workers:
            await asyncio.to_thread(worker.added.wait)

    async def whole(self) -> tuple[int, dict[str, float]]:
        for block in self.blocks:
            self.stream.send(block)
        self.stream.commit(self.batch)
        return await self.answer


async def dropped(crew: Crew) -> None:
    """Waits until both ranks have dropped their gradients."""
    for worker in crew.workers:
        await asyncio.to_thread(worker.dropped.wait)


async def applied_afterwards(service: Service) -> None:
    """Asserts that the trainer now applies the same batch, once."""
    for worker in service.crew.workers:
        worker.block_error = None
        worker.calls.clear()
    assert (await Streamed(service).whole())[0] == 1
    assert [worker.calls for worker in service.crew.workers] == [["begin", "add", "add", "apply"]] * 2


@pytest.mark.parametrize("num_blocks", [1, 2])
async def test_the_gradients_of_a_coordinator_that_dies_are_dropped_at_once(service: Service, num_blocks: int) -> None:
    streamed = Streamed(service)
    for number in range(num_blocks):
        await streamed.send(number)
    streamed.answer.cancel()
    await dropped(service.crew)  # nobody calls the trainer meanwhile
    assert service.crew.workers[1].calls == ["send", "begin", *["add"] * num_blocks, "drop"]
    assert await service.version() == 0
    await applied_afterwards(service)


async def test_a_stream_without_its_commit_applies_nothing(service: Service) -> None:
    streamed = Streamed(service)
    for block in streamed.blocks:
        streamed.stream.send(block)
    streamed.stream._parts.put_nowait([])  # the end of the requests
    with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
        await streamed.answer
    assert service.crew.workers[1].calls == ["send", "begin", "add", "add", "drop"]
    await applied_afterwards(service)


async def test_a_block_that_a_rank_refuses_ends_the_open_stream_and_the_trainer_goes_on(service: Service) -> None:
    streamed = Streamed(service)
    await streamed.send(0)
    service.crew.workers[1].block_error = PreconditionFailed("not this one")
    streamed.stream.send(streamed.blocks[1])
    with pytest.raises(PreconditionFailed, match="not this one"):
        await streamed.answer
    assert service.crew.workers[1].calls == ["send", "begin", "add", "drop"]
    await applied_afterwards(service)


async def test_a_rank_that_crashes_in_a_block_is_the_error_of_the_open_stream(service: Service) -> None:
    streamed = Streamed(service)
    await streamed.send(0)
    service.crew.workers[1].block_error = ZeroDivisionError("boom")
    streamed.stream.send(streamed.blocks[1])
    with pytest.raises(InternalError, match="boom") as caught:
        await streamed.answer
    assert (caught.value.reason, caught.value.metadata["rank"]) == (Reason.RANK_FAILED, "1")
    assert len(service.crew.failures) == 1
    assert await service.version() == 0


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("run_id", ["r", "s"])
async def test_the_stream_of_a_coordinator_that_was_replaced_applies_nothing(
    service: Service, num_blocks: int, run_id: str
) -> None:
    streamed = Streamed(service)
    for number in range(num_blocks):
        await streamed.send(number)
    with new_token():
        await service.open(run_id)
    if num_blocks == 1:
        streamed.stream.send(streamed.blocks[1])
    streamed.stream.commit(streamed.batch)
    with raises(PreconditionFailed, reason=Reason.RUN_REPLACED):
        await streamed.answer
    calls = service.crew.workers[1].calls
    assert calls[: 3 + num_blocks] == ["send", "begin", *["add"] * num_blocks, "drop"]
    assert not {"add", "apply"} & {*calls[3 + num_blocks :]}


async def test_a_block_with_a_flipped_bit_is_not_trained_on(service: Service) -> None:
    changed: list[pb.TrainRequest] = []

    def flip(message: pb.TrainRequest) -> pb.TrainRequest:
        if message.WhichOneof("part") != "frame" or changed:
            return message
        changed.append(message)
        frame = bytearray(message.frame)
        advantage = np.float32(batches.decode([message.frame])["advantages"][0][0].as_py())
        frame[frame.index(advantage.tobytes()) + 3] ^= 0x80
        return pb.TrainRequest(frame=bytes(frame))

    with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
        await Streamed(service, flip).whole()
    assert service.crew.workers[1].calls == ["send", "begin", "drop"]
    await applied_afterwards(service)


@pytest.mark.parametrize(("role", "field"), [(pb.ROLE_REFERENCE, "role"), (pb.ROLE_CRITIC, "tokens_per_block")])
async def test_only_the_policy_is_trained_in_blocks(service: Service, role: pb.Role, field: str) -> None:
    await service.open("r", role=pb.ROLE_CRITIC)
    service.crew.workers[1].calls.clear()
    with raises(InvalidInput, field=field):
        await Streamed(service, role=role).whole()
    assert service.crew.workers[1].calls == []


async def test_without_a_number_of_tokens_there_is_one_block(service: Service) -> None:
    with raises(InvalidInput, field="tokens_per_block"):
        streamed = Streamed(service, tokens_per_block=0)
        for block in streamed.blocks:
            streamed.stream.send(block)
        streamed.stream.commit(streamed.batch)
        await streamed.answer
    assert service.crew.workers[1].calls == ["send", "begin", "add", "drop"]
    await applied_afterwards(service)


WHOLE: dict[str, dict[str, Any]] = {
    "epochs": {"num_minibatches": 2, "num_epochs": 2},
    "means": {"loss": {"kind": "clip_cov"}},
    "data": {"loss": {"kind": "sft"}},
    "router": {"strategy": "megatron", "megatron": {"transformer_config_kwargs": {"moe_z_loss_coeff": 0.1}}},
    "dropout": {"strategy": "megatron", "lora": {"rank": 4, "dropout": 0.1}},
}


@pytest.mark.parametrize("case", WHOLE)
async def test_blocks_are_refused_where_their_gradients_do_not_add_up(service: Service, case: str) -> None:
    await service.open("whole", config_json=json.dumps(WHOLE[case]))
    service.crew.workers[1].calls.clear()
    with raises(InvalidInput, field="tokens_per_block"):
        await Streamed(service).whole()
    assert service.crew.workers[1].calls == []


MISCUT: dict[str, tuple[dict[str, int], str, list[str]]] = {
    "no end": ({"groups_per_minibatch": 0}, "must be above 0 with trainer.num_minibatches", []),
    "a block of two mini-batches": (
        {"groups_per_minibatch": 1, "tokens_per_block": 57},
        "must end .* with its mini-batch",
        ["begin", "drop"],
    ),
    "too few groups": ({"groups_per_minibatch": 2}, "need 4 groups, and 2 have", ["begin", "add", "add", "drop"]),
}


async def publish(service: Service) -> None:
    join = pb.JoinWeightGroupRequest()
    join.group.epoch = 1
    await service.client.call(TrainerService.JoinWeightGroup, join, timeout_s=PATIENCE_S)
    await service.send()


@pytest.mark.parametrize("case", MISCUT)
async def test_blocks_make_the_minibatches_of_the_config(service: Service, case: str) -> None:
    header, problem, calls = MISCUT[case]
    await service.open("two", config_json=json.dumps({"num_minibatches": 2}))
    await publish(service)
    worker = service.crew.workers[1]
    worker.calls.clear()
    with pytest.raises(InvalidInput, match=problem):
        streamed = Streamed(service, **header)
        for block in blocks_of(streamed.batch, BlockCutter(header.get("tokens_per_block", 1))):
            streamed.stream.send(block)
        streamed.stream.commit(streamed.batch)
        await streamed.answer
    assert worker.calls == calls
    assert (await Streamed(service, groups_per_minibatch=1).whole())[0] == 1
    assert worker.calls[len(calls) :] == ["begin", "add", "add", "apply"]
    assert worker.minibatches[-2:] == [0, 1]


@pytest.mark.parametrize(("enough", "sent", "added"), [(57, 1, ["add"]), (1, 57, []), (38, 57, [])])
async def test_each_block_ends_where_the_header_says(
    service: Service, enough: int, sent: int, added: list[str]
) -> None:
    """Checks that blocks that end elsewhere are refused; the two groups have 38 and 19 tokens."""
    streamed = Streamed(service, tokens_per_block=enough)
    for block in blocks_of(streamed.batch, BlockCutter(sent)):
        streamed.stream.send(block)
    streamed.stream.commit(streamed.batch)
    with raises(InvalidInput, field="group") as caught:
        await streamed.answer
    assert f"at least {enough} tokens" in caught.value.message
    assert service.crew.workers[1].calls == ["send", "begin", *added, "drop"]
    await applied_afterwards(service)


async def test_one_minibatch_has_no_more_groups_than_the_header_says(service: Service) -> None:
    with raises(InvalidInput, field="group"):
        await Streamed(service, groups_per_minibatch=1).whole()
    await applied_afterwards(service)
