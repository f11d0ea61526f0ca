"""Tests that the ranks' port accepts messages of its own ranks only."""

import asyncio

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from services.trainer.ranks.calls import Message, Ranks, RanksAddress
from tests.support import PATIENCE_S
from tests.trainer.rank_threads import following
from tests.trainer.toy_nodes import Worker


def test_the_key_is_not_shown() -> None:
    address = RanksAddress("tcp://127.0.0.1:1", "secret")
    assert "secret" not in f"{address} {address!r}"
    assert RanksAddress.unpack(address.pack()) == address


@pytest.mark.parametrize("key", [None, zmq.curve_keypair()[0]])
async def test_a_stranger_is_not_taken_for_a_rank(key: bytes | None) -> None:
    ranks = Ranks(2, "127.0.0.1", pytest.fail)
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.IDENTITY, b"1")
        stranger.setsockopt(zmq.LINGER, 0)
        if key:
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = key
        outcomes = (
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
        )
        monitor = stranger.get_monitor_socket(outcomes)
        stranger.connect(ranks.address.url)
        for message in ([b"host"], [b"call 0", *Message({"value": "forged"}).pack()], [b"noise"]):
            await stranger.send_multipart(message)
        async with asyncio.timeout(PATIENCE_S):
            outcome = (await recv_monitor_message(monitor))["event"]
            # Before the ranks come, so that the stranger is first with the name of one.
            async with following(ranks, Worker(0), Worker(1)):
                await ranks.wait_for_all()
                answers = await ranks.call(Worker.echo, value="own")
        stranger.disable_monitor()
    assert outcome != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert [answer.body["value"] for answer in answers] == ["own", "own"]
    assert ranks.num_hosts == 1
