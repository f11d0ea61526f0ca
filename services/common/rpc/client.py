"""Calls a service: every call has a deadline, and every failure is a LockstepError."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Never, TypeVar

import grpc
from google.protobuf.message import Message

from services.common import errors
from services.common.compat.grpc import keep_early_status
from services.common.rpc import fence
from services.common.rpc.address import require_secure
from services.common.rpc.channel import OPTIONS, Channel
from services.common.rpc.history import NotedCall, noting
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import backoff_s
from services.common.telemetry import outgoing

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# Long enough for a reset connection or a link that fails for a moment, and short enough to report soon that a service
# has ended.
MAX_RETRY_S = 30.0


class Retries:
    """Decides when a call is made again, and when no more.

    All attempts together take at most `timeout_s`; after the first lost connection there are more for `max_retry_s`.
    """

    def __init__(self, timeout_s: float, max_retry_s: float = MAX_RETRY_S):
        self._deadline, self._max_retry_s = time.monotonic() + timeout_s, max_retry_s
        self._until = self._deadline
        self._num_retries = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    async def wait(self, error: errors.LockstepError) -> bool:
        """Waits until the call can be made again, and returns whether it can; the pauses grow.

        It cannot if the service itself raised `error`, or if a limit would pass during the pause.
        """
        if error.reason is not errors.Reason.UNREACHABLE:
            return False
        now, pause_s = time.monotonic(), backoff_s(self._num_retries)
        if self._num_retries == 0:
            self._until = min(self._deadline, now + self._max_retry_s)
        if now + pause_s >= self._until:
            return False
        self._num_retries += 1
        log.warning("calling again in %.1f s: %s", pause_s, error.message)
        await asyncio.sleep(pause_s)
        return True


async def repeated(
    call: Callable[[float], Awaitable[Answer]], *, timeout_s: float, max_retry_s: float = MAX_RETRY_S
) -> Answer:
    """Returns the answer of `call`, which takes its timeout in seconds and is made again after a lost connection.

    This is for answers that are streams. A call with one answer is repeated by `Client.call` itself.
    """
    retries = Retries(timeout_s, max_retry_s)
    while True:
        try:
            return await call(retries.left_s)
        except errors.Unavailable as error:
            if not await retries.wait(error):
                raise


# What gRPC says when a peer has not answered a ping (see channel.py), and when it could not connect to it.
_SILENT, _NOT_CONNECTED = "ping timeout", "failed to connect"

keep_early_status()

Request = TypeVar("Request")

Method = Callable[[Never, Request, Never], Answer | Awaitable[Answer]]
"""A method of a generated servicer that answers once, such as `TrainerServiceServicer.Train`."""
StreamMethod = Callable[[Never, Request, Never], Iterator[Answer] | AsyncIterator[Answer]]
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
        request: Request | AsyncIterator[Message] | Callable[[], AsyncIterator[Message]],
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
                async with self._attempt(name, sent) as (send, noted):
                    answer = await send(timeout=retries.left_s, wait_for_ready=wait_for_ready)
                    self._was_answered = True
                    self._require_message(answer, name)
                    noted.got(answer)
                    return answer
            except errors.LockstepError as failure:
                if not await retries.wait(failure):
                    raise
                wait_for_ready = False

    async def call_starting(self, method: Method[Request, Answer], request: Request, *, timeout_s: float) -> Answer:
        """Returns the answer of a service that may still be starting; the call must change nothing when repeated."""
        return await self.call(method, request, timeout_s=timeout_s, wait_for_ready=True, max_retry_s=MAX_RETRY_S)

    @asynccontextmanager
    async def _attempt(self, name: str, request: object) -> AsyncGenerator[tuple[Callable[..., Any], NotedCall]]:
        """Yields what makes one call, and its note. Raises gRPC's failure as the error that it stands for."""
        stub, metadata = self._channel.stub(), (*outgoing(), *fence.outgoing())
        with noting(f"{self._kind}.{name}", self.address, request) as noted:
            try:
                yield partial(getattr(stub, name), noted.sending(request), metadata=metadata), noted
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and _NOT_CONNECTED in (error.details() or ""):
                    await self._require_mutual_trust()
                raise self._failure(error, name) from error

    async def stream(
        self,
        method: StreamMethod[Request, Answer],
        request: Request | AsyncIterator[Message],
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
    ) -> AsyncGenerator[Answer, None]:
        """Yields the answers of a server stream. Closing the generator cancels the call.

        With `wait_for_ready`, the service is waited for, without a word about what keeps it from answering.
        """
        name = method.__name__
        async with self._attempt(name, request) as (send, noted):
            call = send(timeout=timeout_s, wait_for_ready=wait_for_ready)
            try:
                async for response in call:
                    self._was_answered = True
                    self._require_message(response, name)
                    noted.got(response)
                    yield response
            finally:
                call.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def _require_mutual_trust(self) -> None:
        """Raises the real reason if a certificate is refused, for which gRPC says UNAVAILABLE too.

        A service that has answered before is lost then, as one that has ended: a certificate has expired.
        """
        try:
            await self._channel.explain()
        except errors.Unauthenticated as refused:
            if not self._was_answered:
                raise
            raise errors.Unavailable(refused.message, reason=refused.reason) from refused

    def _require_message(self, answer: object, method: str) -> None:
        if answer is None:  # what gRPC returns for bytes that it cannot parse
            message = f"{method} at {self.address}: the answer cannot be parsed: its bytes changed on the way"
            raise errors.DataLoss(message, reason=errors.Reason.CORRUPT_TRANSFER)

    def _failure(self, error: grpc.aio.AioRpcError, method: str) -> errors.LockstepError:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return errors.InvalidInput(
                f"{self.address} is not a {self._kind} service, or it runs another version of Lockstep: it has no "
                f"method {method}",
                address=self.address,
            )
        target = f"{method} at {self.address}"
        failure = errors.from_rpc_error(error, target=target)
        if failure.reason is errors.Reason.UNREACHABLE and _SILENT in failure.message:
            return errors.Unavailable(
                f"{target}: the {self._kind} service no longer answers: its process is stopped, its host is frozen, or "
                f"the network is cut or very slow ({_SILENT})",
                target=target,
            )
        return failure


# Of four calls in each lease, three may be lost.
_PER_LEASE = 4


class Renewal:
    """Calls GetInfo on one service as often as its lease requires, from `begin` to `end`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def begin(self, client: Client, method: Method[Request, Message], request: Request, lease_s: float) -> None:
        """Begins the calls, if it has not begun yet; `method` and `request` are the service's GetInfo."""
        self._task = self._task or asyncio.create_task(self._renew(client, method, request, lease_s / _PER_LEASE))

    async def end(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _renew(self, client: Client, method: Method[Request, Message], request: Request, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await client.call(method, request, timeout_s=every_s)
            except errors.LockstepError as error:  # calls that need the service notice it themselves
                log.info("the lease at %s could not be renewed: %s", client.address, error.message)
