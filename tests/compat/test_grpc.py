"""Tests that the status of a call that a service ends early is kept, and that grpc.aio still loses it by itself."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest_asyncio
from grpc.aio import _call

from services.common.compat.grpc import keep_early_status
from tests.support import PATIENCE_S

DENIED = grpc.StatusCode.PERMISSION_DENIED
# Of one call with 64 messages of 64 KiB, about every fourth loses its status.
CALLS, MESSAGES = 300, [b"x" * 65536] * 64


class Refusing(grpc.GenericRpcHandler):
    """Ends every call before it has read a message: with DENIED or, for /once/answered, with an answer."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def refuse(messages: AsyncIterator[bytes], context: Any) -> None:
            await context.abort(DENIED, "no")

        async def answer(messages: AsyncIterator[bytes], context: Any) -> bytes:
            return b"yes"

        is_answered = handler_call_details.method == "/once/answered"
        return grpc.stream_unary_rpc_method_handler(answer if is_answered else refuse)


@pytest_asyncio.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def ends(channel: grpc.aio.Channel, method: str) -> set[Any]:
    """Returns how CALLS calls end, 30 at a time: their codes and answers."""
    function: Callable[..., Awaitable[bytes]] = channel.stream_unary(method)

    async def end() -> Any:
        try:
            return await function(iter(MESSAGES), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            return error.code()

    found: set[Any] = set()
    for _ in range(CALLS // 30):
        found |= set(await asyncio.gather(*(end() for _ in range(30))))
    return found


async def test_a_call_that_is_refused_early_ends_as_the_service_says(channel, monkeypatch) -> None:
    mixin = _call._StreamRequestMixin
    monkeypatch.setattr(mixin, "_write", inspect.unwrap(mixin._write))
    assert await ends(channel, "/once/refused") > {DENIED}  # if this fails, remove services/common/compat/grpc.py
    keep_early_status()
    assert await ends(channel, "/once/refused") == {DENIED}


async def test_a_call_that_is_answered_early_has_its_answer(channel) -> None:
    assert await ends(channel, "/once/answered") == {b"yes"}
