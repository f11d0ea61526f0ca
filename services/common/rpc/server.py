"""Serves gRPC for every service, with typed errors, health, metrics and access control.

Beyond loopback every connection uses mTLS, and every method is limited to the identities that tls.py lists for it.
Plaintext is for loopback; on other interfaces it is refused unless the operator allows it with --insecure.

Metrics are served to Prometheus. Each process has its own registry; the name of a metric ends with its unit.
"""

import asyncio
import contextlib
import functools
import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, Never, NoReturn, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import grpc
import prometheus_client as prometheus
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from lockstep.progress.v1 import progress_pb2_grpc
from lockstep.types.v1.types_pb2 import ServiceInfo

from services.common.errors import InternalError, InvalidInput, LockstepError, Reason, to_status
from services.common.rpc import fence
from services.common.rpc.address import is_loopback, parse_address, require_loopback
from services.common.rpc.channel import server_options
from services.common.rpc.progress import PROGRESS
from services.common.rpc.tls import Credentials, is_address, require_role
from services.common.telemetry import NO_TRACE, Span, Trace, incoming

log = logging.getLogger(__name__)

SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)
"""Bucket upper bounds of all histograms, in seconds. A call may take a millisecond or half an hour."""


class RpcMetrics:
    """Counts and times the calls that a server answers."""

    def __init__(self, registry: prometheus.CollectorRegistry | None):
        def counter(name: str, help: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"lockstep_rpc_{name}_total", help, ["method", *labels], registry=registry)

        self._started = counter("started", "Calls that were received.")
        self._finished = counter("finished", "Calls that ended, by gRPC status code.", "code")
        self._failures = counter("failures", "Calls that failed, by typed reason.", "reason")
        about = "Time from receiving a call to its end."
        self._seconds = prometheus.Histogram(
            "lockstep_rpc_seconds", about, ["method"], registry=registry, buckets=SECONDS
        )

    @contextlib.contextmanager
    def call(self, span: Span) -> Generator[None]:
        """Counts the block as the call that `span` is, which ends with it."""
        method, code, reason = span.name, "OK", ""
        self._started.labels(method).inc()
        try:
            yield
        except LockstepError as error:
            code, reason = error.code.name, error.reason.value
            raise
        except (asyncio.CancelledError, GeneratorExit):  # also when the deadline has passed
            code = "CANCELLED"
            raise
        except Exception:
            code, reason = "INTERNAL", Reason.INTERNAL.value
            raise
        finally:
            self._seconds.labels(method).observe(span.seconds)
            self._finished.labels(method, code).inc()
            if reason:
                self._failures.labels(method, reason).inc()


def incarnation() -> str:
    """Identifies this process, so that clients notice that a service was restarted."""
    return _incarnation_of(os.getpid())


@functools.cache
def _incarnation_of(pid: int) -> str:
    return uuid.uuid4().hex  # by pid, because a fork is another process


Context = grpc.aio.ServicerContext[object, object]

_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


Method = TypeVar("Method", bound=Callable[..., Awaitable[object]])
_SHIELDED = "_is_shielded"


def shielded(method: Method) -> Method:
    """Lets an RPC's method finish if its caller gives up, so that its effects are recorded before the next call."""
    setattr(method, _SHIELDED, True)
    return method


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns a raised LockstepError into its status, and any other exception into INTERNAL and a logged traceback.

    Every call is a span of `trace`, is counted in `metrics`, and runs in the context that the caller sent. With
    `by_role`, a caller whose identity may not call a method gets PERMISSION_DENIED.
    """

    def __init__(self, trace: Trace, metrics: RpcMetrics, *, by_role: bool = False):
        self._trace, self._metrics, self._by_role = trace, metrics, by_role

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        # Health checks and reflection raise no errors of Lockstep, and refuse no identity.
        if handler is None or not method.startswith("/lockstep."):
            return handler
        make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        if handler.response_streaming:
            behavior = self._stream(handler.stream_stream or handler.unary_stream, method)
        else:
            behavior = self._unary(handler.stream_unary or handler.unary_unary, method)
        return make(behavior, handler.request_deserializer, handler.response_serializer)

    def _unary(self, behavior: Callable[..., Coroutine[object, Never, object]], method: str) -> Callable[..., object]:
        is_shielded = hasattr(behavior, _SHIELDED)

        async def call(request: object, context: Context) -> object:
            async with self._answering(context, method):
                answer = behavior(request, context)
                if not is_shielded:
                    return await answer
                task = asyncio.create_task(answer)
                try:
                    return await asyncio.shield(task)
                except asyncio.CancelledError:  # nobody else would hear of an error that the task ends with
                    task.add_done_callback(functools.partial(_log_end, method))
                    raise

        return call

    def _stream(self, behavior: Callable[..., AsyncGenerator[object]], method: str) -> Callable[..., object]:
        async def call(request: object, context: Context) -> AsyncIterator[object]:
            # Closed here: if the caller leaves, the method's `finally` would otherwise run when the generator is
            # collected.
            async with self._answering(context, method), contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return call

    @contextlib.asynccontextmanager
    async def _answering(self, context: Context, method: str) -> AsyncGenerator[None]:
        name = method.rpartition("/")[2]
        metadata = context.invocation_metadata() or ()
        with incoming(metadata), fence.incoming(metadata):
            try:
                # A watcher's call lasts as long as its session.
                trace = NO_TRACE if method == _WATCH else self._trace
                with trace.span(name) as span, self._metrics.call(span):
                    if self._by_role:
                        require_role(method, context.auth_context())
                    yield
            except LockstepError as error:
                log.info("%s: %s %s", method, error.reason, error.message)
                await _abort(context, error)
            except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                raise
            except Exception as error:
                log.exception("%s failed", method)
                why, where = f"{type(error).__name__}: {error}", traceback.format_exc(limit=-4)
                await _abort(context, InternalError(why, traceback=where))


_WATCH = "/lockstep.progress.v1.ProgressService/Watch"


def _log_end(method: str, task: asyncio.Task[object]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, LockstepError):
        log.info("%s, whose caller has given up: %s %s", method, error.reason, error.message)
    elif error:
        log.error("%s failed, and its caller has given up", method, exc_info=error)


async def _abort(context: Context, error: LockstepError) -> NoReturn:
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


@dataclass(frozen=True)
class OpenedRun:
    """The open run of a service: its id and the digest of its config section, both empty if none is open."""

    run_id: str
    config_digest: str


NO_RUN = OpenedRun("", "")


_version = functools.cache(version)  # each reads files, and GetInfo is called often


def service_info(service: str, state: str, *, run: OpenedRun, libraries: Sequence[str]) -> ServiceInfo:
    """Returns the part of GetInfo's answer that all services have."""
    return ServiceInfo(
        service=service,
        version=_version("lockstep-rl"),
        incarnation=incarnation(),
        state=state,
        run_id=run.run_id,
        config_digest=run.config_digest,
        libraries={name: _version(name) for name in libraries},
        time_ns=time.time_ns(),
    )


class Server:
    """Runs a gRPC server with health checks until a signal, `stop()` or `fail()`.

    With `tls` it requires mTLS; without, it offers reflection.
    """

    def __init__(
        self,
        trace: Trace = NO_TRACE,
        tls: Credentials | None = None,
        registry: prometheus.CollectorRegistry | None = None,
    ) -> None:
        self._tls = tls
        interceptor = StatusInterceptor(trace, RpcMetrics(registry), by_role=tls is not None)
        # What `add_XServicer_to_server` takes.
        self.grpc = grpc.aio.server(interceptors=[interceptor], options=server_options())
        PROGRESS.trace = trace
        self._health = health.aio.HealthServicer()
        self._stopping = asyncio.Event()
        self._names: list[str] = []
        self.exit_code = 0
        self.port = 0

    async def start(self, address: str, names: list[str], *, insecure: bool = False) -> int:
        """Listens on `address` (port 0 picks a free port) for the services `names`; returns the port."""
        host, port = parse_address(address, field="listen")
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        progress_pb2_grpc.add_ProgressServiceServicer_to_server(PROGRESS, self.grpc)
        self._names = names
        is_name = host != "localhost" and not is_address(host.strip("[]"))
        if is_name and is_loopback(host):  # as Debian writes a host's own name into /etc/hosts
            log.warning("--listen %s: this name is a loopback address here; other hosts cannot connect", address)
        if self._tls is None:
            require_loopback(host, insecure=insecure)
            reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc)
        try:
            if self._tls is None:
                self.port = self.grpc.add_insecure_port(f"{host}:{port}")
            else:
                self.port = self.grpc.add_secure_port(f"{host}:{port}", self._tls.for_server())
        except RuntimeError as error:
            raise InvalidInput(
                f"--listen {address}: the port is in use, or the address is not one of this host", field="listen"
            ) from error
        await self.grpc.start()
        for name in (*names, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info("%s listens on %s:%d", ", ".join(names), host, self.port)
        return self.port

    def stop(self) -> None:
        """Ends `serve` when the calls in progress have ended, or after its grace period."""
        self._stopping.set()

    def fail(self, why: str) -> None:
        """Ends `serve` with exit code 1: the process cannot continue, and its supervisor should start a new one."""
        log.error("ending: %s", why)
        self.exit_code = 1
        self._stopping.set()

    async def serve(self, *, grace_s: float = 2.0, drain: Callable[[], Awaitable[None]] | None = None) -> int:
        """Serves until asked to stop, and then until `drain` has returned; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._stopping.wait()
        for name in (*self._names, ""):  # before the calls end, so that nobody sends new ones meanwhile
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        if drain is not None:
            await drain()
        PROGRESS.close()
        await self.grpc.stop(grace_s)
        return self.exit_code


# One more connection closes the oldest, so that idle ones neither keep anybody out nor take ever more threads.
_MAX_PAGE_CONNECTIONS = 64


class PageHandler(WSGIRequestHandler):
    """Answers one connection, in a thread of its own."""

    timeout = 10.0  # of silence, after which the connection is closed
    _open: ClassVar[dict[socket.socket, None]] = {}  # the oldest first

    def handle(self) -> None:
        self._open[self.connection] = None
        for oldest in list(self._open)[:-_MAX_PAGE_CONNECTIONS]:
            with contextlib.suppress(OSError):  # it ends by itself at this moment
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            with contextlib.suppress(OSError):  # the client is gone, sends nothing, or does not read
                super().handle()
        finally:
            self._open.pop(self.connection, None)

    def parse_request(self) -> bool:
        """Refuses names of other hosts on loopback, by which a web page in a browser could read it (DNS rebinding)."""
        if not super().parse_request():
            return False
        server = self.server
        assert isinstance(server, WSGIServer)
        asked = re.sub(r":\d*$", "", self.headers.get("Host", "").lower()).strip("[]")
        own = ("", "localhost", server.server_name.lower(), socket.gethostname().lower())
        if asked in own or is_address(asked) or not is_loopback(f"[{server.server_address[0]}]"):
            return True
        self.send_error(421, explain="ask for localhost, or for an IP address")
        return False

    def log_message(self, format: str, *args: object) -> None: ...


@dataclass(frozen=True)
class Page:
    """Where metrics are served; an empty `address` serves none."""

    address: str = ""
    insecure: bool = False
    field: str = "--metrics"
    consent: str = "pass --metrics-insecure"
    """What an error message tells the user to do to allow another interface than loopback."""


class Metrics:
    """The metrics registry of a process, and the server of its page."""

    def __init__(self, service: str, page: Page = Page()):
        self._page, self.is_served = page, bool(page.address)
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        if page.address:
            self._host, self._port = parse_address(page.address, field=page.field)
            require_loopback(self._host, insecure=page.insecure, field=page.field, consent=page.consent)
        prometheus.disable_created_metrics()  # would add a second series to each counter: its creation time
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        about = prometheus.Info(
            "lockstep_service", "Name, version and incarnation of the service.", registry=self.registry
        )
        about.info({"service": service, "version": version("lockstep-rl"), "incarnation": incarnation()})

    def serve(self) -> int:
        """Serves http://HOST:PORT/metrics from a thread, if there is an address.

        Returns the port, which is a free one if the address has port 0; 0 if nothing is served.
        """
        if not self._page.address:
            return 0
        try:
            server, _ = self._server = prometheus.start_http_server(self._port, self._host.strip("[]"), self.registry)
        except OSError as error:
            raise InvalidInput(f"{self._page.field} {self._page.address}: {error}", field=self._page.field) from error
        server.RequestHandlerClass = PageHandler
        # With the standard library's 5, waiting clients retry after seconds.
        server.socket.listen(2 * _MAX_PAGE_CONNECTIONS)
        log.info("metrics on http://%s:%d/metrics", self._host, server.server_port)
        return server.server_port

    def close(self) -> None:
        if self._server:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
