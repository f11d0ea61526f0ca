"""gRPC as every service uses it: one way to serve, one way to connect, a deadline on every call.

Plaintext is for loopback: a port on another interface is refused unless the operator asks for it.
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

from services.common.errors import (
    MAX_HEADER_BYTES,
    InternalError,
    InvalidInput,
    LockstepError,
    from_rpc_error,
    to_status,
)
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


def require_loopback(host: str, *, insecure: bool) -> None:
    """Refuses a plaintext listener that other hosts can reach, unless `insecure` asks for it.

    Raises:
        InvalidInput: `host` is not a loopback address.
    """
    if insecure:
        return
    with contextlib.suppress(ValueError, OSError):
        if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
            return
    raise InvalidInput(
        f"--listen {host}: plaintext is only served on loopback; pass --insecure on a network that you trust",
        field="listen",
    )


_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Answers(grpc.aio.ServerInterceptor):
    """Answers a raised LockstepError with its status, and anything else with INTERNAL and the traceback in the log.

    Every call is a span of `trace`.
    """

    def __init__(self, trace: Trace):
        self._trace = trace

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
        with self._trace.span(method.rpartition("/")[2]):
            try:
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
    """A gRPC server with health and reflection, serving until a signal, `stop()` or `fail()`."""

    def __init__(self, trace: Trace = NO_TRACE) -> None:
        self._server = grpc.aio.server(interceptors=[Answers(trace)], options=_OPTIONS)
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
        require_loopback(host, insecure=insecure)
        self._names = names
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise InvalidInput(
                f"--listen {address}: the port is in use or the host is not this one", field="listen"
            ) from error
        await self._server.start()
        for name in (*names, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info("%s listens on %s:%d", ", ".join(names), host, self.port)
        return self.port

    def stop(self) -> None:
        """Ends `serve` after the calls in progress, or after its grace."""
        self._stopping.set()

    def fail(self, why: str) -> None:
        """Ends `serve` with exit code 1: the process cannot go on and its supervisor should start a new one."""
        log.error("ending: %s", why)
        self.exit_code = 1
        self._stopping.set()

    async def serve(self, *, grace_s: float = 2.0) -> int:
        """Serves until told to end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._stopping.wait()
        for name in (*self._names, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(grace_s)
        return self.exit_code


class Client:
    """Calls one service. Every call names its deadline; every failure is the exception that the service raised."""

    def __init__(self, address: str, stub: type):
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = stub(self._channel)

    async def call(self, method: str, request: Any, *, timeout_s: float, wait_for_ready: bool = False) -> Any:
        """One answer. `request` is a message, or an async iterator of them for a client stream.

        Raises:
            LockstepError: As the service raised it; Unavailable if it is gone, DeadlineExceeded after `timeout_s`.
        """
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, target=f"{method} at {self.address}") from error

    async def stream(self, method: str, request: Any, *, timeout_s: float) -> AsyncIterator[Any]:
        """The answers of a server stream. Closing the iterator cancels the call.

        Raises:
            LockstepError: As in `call`.
        """
        call = getattr(self._stub, method)(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, target=f"{method} at {self.address}") from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
