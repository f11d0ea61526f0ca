"""Tests that an answer whose bytes are no message is a typed error."""

import grpc
import pytest
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc

from services.common.errors import DataLoss, Reason
from services.common.rpc.client import Client
from tests.support import PATIENCE_S


async def _garbage(request: bytes, context: object) -> bytes:
    return b"\xff" * 9


async def test_an_answer_that_cannot_be_parsed_is_corrupt() -> None:
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(_garbage)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("lockstep.reward.v1.RewardService", {"GetInfo": handler}),)
    )
    client = Client(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", reward_pb2_grpc.RewardServiceStub)
    await server.start()
    try:
        method = reward_pb2_grpc.RewardServiceServicer.GetInfo
        with pytest.raises(DataLoss) as caught:
            await client.call(method, pb.GetInfoRequest(), timeout_s=PATIENCE_S, wait_for_ready=True)
        assert caught.value.reason is Reason.CORRUPT_TRANSFER
    finally:
        await client.close()
        await server.stop(None)
