"""gRPC as every service uses it: one way to serve, one way to connect, a deadline on every call.

Off loopback every connection is mTLS, and every method is for the roles that the table in roles.py gives it. Plaintext
is for loopback: another interface, and an address that is not this host, are refused unless the operator asks for it.
"""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from lockstep.types.v1.types_pb2 import ServiceInfo
from prometheus_client import CollectorRegistry

from services.common.channel import Channel
from services.common.context import incoming, outgoing
from services.common.errors import (
    MAX_HEADER_BYTES,
    InternalError,
    InvalidInput,
    LockstepError,
    from_rpc_error,
    to_status,
)
from services.common.roles import require_role
from services.common.rpc_metrics import RpcMetrics
from services.common.tls import LOCAL, Credentials, Transport
from services.common.trace import NO_TRACE, Trace

log = logging.getLogger(__name__)

# Frames are 1 to 2 MiB; one prompt group of long samples can be larger.
MAX_MESSAGE_BYTES = 64 << 20
# Tells one process of a service from the next.
INCARNATION = uuid.uuid4().hex

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_HEADER_BYTES),
    # A peer whose host vanished is noticed in 20 s, also in the middle of a long call.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]


def parse_address(address: str, *, field: str) -> tuple[str, int]:
    """Splits `host:port`.

    Raises:
        InvalidInput: It is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"{field}: {address!r} is not HOST:PORT", field=field)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can be behind `host`."""
    with contextlib.suppress(ValueError, OSError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False


def require_loopback(
    host: str,
    *,
    insecure: bool,
    field: str = "--listen",
    consent: str = "pass --tls with a certificate, or --insecure",
) -> None:
    """Refuses a plaintext listener that other hosts can reach, unless `insecure` asks for it.

    Raises:
        InvalidInput: `host` is not a loopback address.
    """
    if not insecure and not is_loopback(host):
        raise InvalidInput(
            f"{field} {host}: plaintext is only served on loopback; {consent} on a network that you trust",
            field=field.removeprefix("--"),
        )


def require_secure(address: str, transport: Transport, *, field: str) -> None:
    """Refuses to call `address` in plaintext over a network, unless `transport` asks for it.

    Raises:
        InvalidInput: It does not; or `address` is malformed.
    """
    host, _ = parse_address(address, field=field)
    if transport.tls is None and not transport.insecure and not is_loopback(host):
        raise InvalidInput(
            f"{field}: {address} is not on this host, and plaintext does not leave it; pass --tls with a certificate, "
            "or --insecure on a network that you trust",
            field=field,
        )


_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Answers(grpc.aio.ServerInterceptor):
    """Answers a raised LockstepError with its status, and anything else with INTERNAL and the traceback in the log.

    Every call is a span of `trace` and is counted in `metrics`; it belongs to what the caller's work belongs to. With
    `by_role`, a caller without the role for a method gets PERMISSION_DENIED.
    """

    def __init__(self, trace: Trace, metrics: RpcMetrics, *, by_role: bool = False):
        self._trace, self._metrics, self._by_role = trace, metrics, by_role

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/lockstep."):
            return handler
        make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        if handler.response_streaming:
            behavior = self._stream(handler.stream_stream or handler.unary_stream, method)
        else:
            behavior = self._unary(handler.stream_unary or handler.unary_unary, method)
        return make(behavior, handler.request_deserializer, handler.response_serializer)

    def _unary(self, behavior: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._answering(context, method):
                return await behavior(request, context)

        return call

    def _stream(self, behavior: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._answering(context, method), contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return call

    @contextlib.asynccontextmanager
    async def _answering(self, context: grpc.aio.ServicerContext, method: str) -> AsyncIterator[None]:
        name = method.rpartition("/")[2]
        with incoming(context.invocation_metadata() or ()):
            try:
                with self._trace.span(name), self._metrics.call(name):
                    if self._by_role:
                        require_role(method, context.auth_context())
                    yield
            except LockstepError as error:
                log.info("%s: %s %s", method, error.reason, error.message)
                await context.abort_with_status(to_status(error))
            except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                raise
            except Exception as error:
                log.exception("%s failed", method)
                why, where = f"{type(error).__name__}: {error}", traceback.format_exc(limit=-4)
                await context.abort_with_status(to_status(InternalError(why, traceback=where)))


def service_info(service: str, state: str, *, run: tuple[str, str], libraries: tuple[str, ...]) -> ServiceInfo:
    """What a service answers to GetInfo first; `run` is the open run's id and the digest of its config section."""
    return ServiceInfo(
        service=service,
        version=version("lockstep-rl"),
        incarnation=INCARNATION,
        state=state,
        run_id=run[0],
        config_digest=run[1],
        libraries={name: version(name) for name in libraries},
        time_ns=time.time_ns(),
    )


class Server:
    """A gRPC server with health, serving until a signal, `stop()` or `fail()`. With `tls` mTLS, without reflection."""

    def __init__(
        self, trace: Trace = NO_TRACE, tls: Credentials | None = None, registry: CollectorRegistry | None = None
    ) -> None:
        self._tls = tls
        answers = Answers(trace, RpcMetrics(registry), by_role=tls is not None)
        self._server = grpc.aio.server(interceptors=[answers], options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._stopping = asyncio.Event()
        self._names: list[str] = []
        self.exit_code = 0
        self.port = 0

    @property
    def grpc(self) -> grpc.aio.Server:
        """The server, for `add_XServicer_to_server`."""
        return self._server

    async def start(self, address: str, names: list[str], *, insecure: bool = False) -> int:
        """Listens on `address` (port 0 picks one) for the services `names`; returns the port.

        Raises:
            InvalidInput: The address is malformed, not loopback, or in use.
        """
        host, port = parse_address(address, field="listen")
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = names
        if self._tls is None:
            require_loopback(host, insecure=insecure)
            reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            self.port = self._bind(f"{host}:{port}")
        except RuntimeError as error:
            raise InvalidInput(
                f"--listen {address}: the port is in use or the host is not this one", field="listen"
            ) from error
        await self._server.start()
        for name in (*names, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info("%s listens on %s:%d", ", ".join(names), host, self.port)
        return self.port

    def _bind(self, address: str) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self._tls.for_server())

    def stop(self) -> None:
        """Ends `serve` after the calls in progress, or after its grace."""
        self._stopping.set()

    def fail(self, why: str) -> None:
        """Ends `serve` with exit code 1: the process cannot go on and its supervisor should start a new one."""
        log.error("ending: %s", why)
        self.exit_code = 1
        self._stopping.set()

    async def serve(self, *, grace_s: float = 2.0, drain: Callable[[], Awaitable[None]] | None = None) -> int:
        """Serves until told to end, and on until `drain` has returned; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._stopping.wait()
        for name in (*self._names, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        if drain is not None:
            await drain()
        await self._server.stop(grace_s)
        return self.exit_code


class Client:
    """Calls one service. Every call names its deadline; every failure is the exception that the service raised."""

    def __init__(self, address: str, stub: type, transport: Transport = LOCAL):
        """Does not connect yet.

        Raises:
            InvalidInput: As `require_secure`.
        """
        require_secure(address, transport, field="address")
        self.address = address
        self._kind = stub.__name__.removesuffix("Stub").removesuffix("Service").lower()
        self._channel = Channel(address, stub, transport.tls, _OPTIONS)
        self._was_answered = False

    async def call(self, method: str, request: Any, *, timeout_s: float, wait_for_ready: bool = False) -> Any:
        """One answer. `request` is a message, or an async iterator of them for a client stream.

        Raises:
            LockstepError: As the service raised it; Unavailable if it is not there, DeadlineExceeded after `timeout_s`,
                Unauthenticated if one end refuses the other, InvalidInput if another kind of service is there.
        """
        if wait_for_ready:
            timeout_s = await self._channel.connect(timeout_s, target=f"{method} at {self.address}")
        stub = self._channel.stub()
        try:
            answer = await getattr(stub, method)(
                request, timeout=timeout_s, wait_for_ready=wait_for_ready, metadata=outgoing()
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not self._was_answered:
                await self._channel.explain()
            raise self._failure(error, method) from error
        self._was_answered = True
        return answer

    async def stream(self, method: str, request: Any, *, timeout_s: float) -> AsyncIterator[Any]:
        """The answers of a server stream. Closing the iterator cancels the call.

        Raises:
            LockstepError: As in `call`.
        """
        stub = self._channel.stub()
        call = getattr(stub, method)(request, timeout=timeout_s, metadata=outgoing())
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, method) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    def _failure(self, error: grpc.aio.AioRpcError, method: str) -> LockstepError:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return InvalidInput(
                f"{self.address} is not the address of a {self._kind} service, or that is of another version: it has "
                f"no method {method}",
                address=self.address,
            )
        return from_rpc_error(error, target=f"{method} at {self.address}")
