"""Implements the command line that all services share."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.common import process
from services.common.errors import LockstepError
from services.common.rpc.server import Metrics, Page, incarnation
from services.common.rpc.tls import Credentials, Role
from services.common.telemetry import NO_TRACE, Otel, Trace

REFUSED = 2
"""Exit code after a line with an error's reason, and of wrong options."""


@dataclass(frozen=True)
class ServeOptions:
    """What a service is started with: address, credentials, and where spans and metrics go."""

    listen: str
    insecure: bool
    trace: Trace = NO_TRACE
    tls: Credentials | None = None
    metrics: Metrics = field(default_factory=lambda: Metrics("none"))


def serve_from_command_line(
    service: str,
    run: Callable[[ServeOptions], Coroutine[object, object, int]],
    args: Sequence[str] | None = None,
    *,
    parents: Sequence[argparse.ArgumentParser] = (),
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Parses the arguments of `lockstep-<service>`, including those of `parents`, runs it and exits with its code.

    `prepare` is called before the service runs and before anything uses gRPC.
    """
    name, about = f"lockstep-{service}", f"Runs Lockstep's {service} service."
    parser = argparse.ArgumentParser(name, description=about, parents=list(parents), allow_abbrev=False)
    add = parser.add_argument
    add("--listen", default="127.0.0.1:0", help="HOST:PORT to serve on; port 0 picks a free port")
    security = parser.add_mutually_exclusive_group()
    mtls = "require mTLS, with ca.pem, cert.pem and key.pem from DIR"
    security.add_argument("--tls", type=Path, metavar="DIR", help=mtls)
    security.add_argument("--insecure", action="store_true", help="allow plaintext on an interface other than loopback")
    add("--trace", default="", metavar="FILE", help="append a span per call to FILE, for Perfetto")
    add("--otel", default="", metavar="URL", help="send a span per call to this OTLP/gRPC collector (extra: otel)")
    add("--metrics", default="", metavar="HOST:PORT", help="serve Prometheus metrics on http://HOST:PORT/metrics")
    add("--metrics-insecure", action="store_true", help="allow --metrics on an interface other than loopback")
    add("--log-format", choices=("text", "json"), default="text", help="format of log lines on stderr")
    add("--exit-with", type=int, metavar="PID", help="exit when the process PID ends")
    options = parser.parse_args(args)
    process.open_standard_streams()
    process.configure_logging(service, options.log_format)
    process.allow_descriptors()
    process.keep_files_private()
    process.call_loopback_directly()
    if options.exit_with:
        process.exit_with(options.exit_with)
    with exit_on_error(service):
        process.require_extra(service)
        prepare()
        tls = options.tls and Credentials(options.tls)
        if tls:
            # Services that `lockstep run --tls` starts use the coordinator's certificate.
            tls.require_role(Role(service), Role.COORDINATOR)
        metrics = Metrics(service, Page(options.metrics, options.metrics_insecure))
        otel = Otel(options.otel, name, incarnation(), field="--otel") if options.otel else None
        trace = Trace(options.trace, f"{service} {options.listen}", otel)
        with closing(trace):
            code = asyncio.run(run(ServeOptions(options.listen, options.insecure, trace, tls, metrics)))
        sys.exit(code)


@contextmanager
def exit_on_error(service: str) -> Generator[None]:
    """Exits with one line about an error of Lockstep that the block raises, and code 2."""
    try:
        yield
    except LockstepError as error:
        sys.stderr.write(f"lockstep-{service}: error: {error.reason}: {error.message}\n")
        sys.exit(REFUSED)
