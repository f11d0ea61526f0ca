"""Calls a service: every call has a deadline, and every failure is a LockstepError."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from services.common.compat.grpc import keep_early_status
from services.common.errors import DataLoss, InvalidInput, LockstepError, Reason, Unavailable, from_rpc_error
from services.common.rpc import fence
from services.common.rpc.address import require_secure
from services.common.rpc.channel import OPTIONS, Channel
from services.common.rpc.history.calls import NotedCall, noting
from services.common.rpc.retry import Retries
from services.common.rpc.security.tls import LOCAL, Transport
from services.common.telemetry.context import outgoing

# What gRPC says when a peer has not answered a ping (see options.py).
_SILENT = "ping timeout"

keep_early_status()

Request = TypeVar("Request")
Answer = TypeVar("Answer")

Method = Callable[[Any, Request, Any], Answer | Awaitable[Answer]]
"""A method of a generated servicer that answers once, such as `TrainerServiceServicer.Train`."""
StreamMethod = Callable[[Any, Request, Any], Iterator[Answer] | AsyncIterator[Answer]]
"""A method of a generated servicer that answers with a stream."""


class Client:
    """Calls one service. Every call names its deadline; every failure is the exception that the service raised.

    A call names its method by the generated servicer, `client.call(TrainerServiceServicer.Train, ...)`, where a checker
    finds the types of request and answer. The methods of a stub would be those of one channel, and this client opens
    another when its certificate is renewed.
    """

    def __init__(self, address: str, stub: type, transport: Transport = LOCAL, *, is_alone: bool = False):
        """Creates the client without connecting.

        Clients of one address share a connection; with `is_alone`, this one makes its own, because that of the others
        may be half-open.

        Raises:
            InvalidInput: As in `require_secure`.
        """
        require_secure(address, transport, field="address")
        self.address = address
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)] if is_alone else OPTIONS
        self._kind = stub.__name__.removesuffix("Stub").removesuffix("Service").lower()
        self._channel = Channel(address, stub, transport, options)
        self._was_answered = False

    async def call(
        self,
        method: Method[Request, Answer],
        request: Request | AsyncIterator[Any] | Callable[[], AsyncIterator[Any]],
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        max_retry_s: float = 0.0,
    ) -> Answer:
        """Returns the answer to `request`: a message or, for a client stream, messages or a function that makes them.

        With `wait_for_ready`, the service is waited for, but not again once a connection was lost.

        With `max_retry_s`, the call is made again after a lost connection (see `Retries`); it must change nothing when
        it is repeated, and messages must come from a function.

        Raises:
            LockstepError: The error that the service raised; Unavailable if it cannot be reached, DeadlineExceeded
                after `timeout_s`, Unauthenticated if client or service rejects the other's certificate, InvalidInput
                if another kind of service has the address.
        """
        name = method.__name__
        if wait_for_ready:
            timeout_s = await self._channel.connect(timeout_s, target=f"{name} at {self.address}")
        retries = Retries(timeout_s, max_retry_s)
        while True:
            sent = request() if callable(request) else request
            try:
                async with self._attempt(name, sent) as (stub, noted):
                    options = {"timeout": retries.left_s, "wait_for_ready": wait_for_ready, "metadata": _metadata()}
                    answer = await getattr(stub, name)(noted.sending(sent), **options)
                    self._was_answered = True
                    self._require_message(answer, name)
                    noted.got(answer)
                    return answer
            except LockstepError as failure:
                if not await retries.wait(failure):
                    raise
                wait_for_ready = False

    @asynccontextmanager
    async def _attempt(self, name: str, request: Any) -> AsyncGenerator[tuple[Any, NotedCall]]:
        """Yields the stub and the note of one call. Raises gRPC's failure as the error that it stands for."""
        stub = self._channel.stub()
        with noting(f"{self._kind}.{name}", self.address, request) as noted:
            try:
                yield stub, noted
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and not self._was_answered:
                    await self._channel.explain()
                raise self._failure(error, name) from error

    async def stream(
        self, method: StreamMethod[Request, Answer], request: Request | AsyncIterator[Any], *, timeout_s: float
    ) -> AsyncGenerator[Answer, None]:
        """Yields the answers of a server stream. Closing the generator cancels the call.

        Raises:
            LockstepError: As in `call`.
        """
        name, stub = method.__name__, self._channel.stub()
        with noting(f"{self._kind}.{name}", self.address, request) as noted:
            call = getattr(stub, name)(noted.sending(request), timeout=timeout_s, metadata=_metadata())
            try:
                async for response in call:
                    self._require_message(response, name)
                    noted.got(response)
                    yield response
            except grpc.aio.AioRpcError as error:
                raise self._failure(error, name) from error
            finally:
                call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    def _require_message(self, answer: object, method: str) -> None:
        if answer is None:  # what gRPC returns for bytes that it cannot parse
            message = f"{method} at {self.address}: the answer cannot be parsed: its bytes changed on the way"
            raise DataLoss(message, reason=Reason.CORRUPT_TRANSFER)

    def _failure(self, error: grpc.aio.AioRpcError, method: str) -> LockstepError:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return InvalidInput(
                f"{self.address} is not a {self._kind} service, or it runs another version of Lockstep: it has no "
                f"method {method}",
                address=self.address,
            )
        target = f"{method} at {self.address}"
        failure = from_rpc_error(error, target=target)
        if failure.reason is Reason.UNREACHABLE and _SILENT in failure.message:
            return Unavailable(
                f"{target}: the {self._kind} service no longer answers: its process is stopped, its host is frozen, or "
                f"the network is cut ({_SILENT})",
                target=target,
            )
        return failure


def _metadata() -> tuple[tuple[str, str], ...]:
    return (*outgoing(), *fence.outgoing())
