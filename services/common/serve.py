"""The command line that all services share."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.common.errors import LockstepError
from services.common.process import configure_logging, exit_with
from services.common.trace import NO_TRACE, Trace


@dataclass(frozen=True)
class ServeOptions:
    """Address, credentials and where spans go: all that a service is started with."""

    listen: str
    insecure: bool
    trace: Trace = NO_TRACE


def serve_from_command_line(
    service: str,
    run: Callable[[ServeOptions], Awaitable[int]],
    args: Sequence[str] | None = None,
    *,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> None:
    """Parses the arguments of `lockstep-<service>`, also those of `parents`, runs it and exits with its code."""
    parser = argparse.ArgumentParser(
        prog=f"lockstep-{service}", description=f"Serves the {service} of Lockstep.", parents=list(parents)
    )
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT to serve on; port 0 picks a free one")
    parser.add_argument("--insecure", action="store_true", help="allow plaintext on an interface other than loopback")
    parser.add_argument("--trace", default="", metavar="FILE", help="append a span for each call, for Perfetto")
    parser.add_argument("--exit-with", type=int, metavar="PID", help="end when this process ends")
    options = parser.parse_args(args)
    configure_logging(service)
    if options.exit_with:
        exit_with(options.exit_with)
    try:
        trace = Trace(options.trace, f"{service} {options.listen}")
        code = asyncio.run(run(ServeOptions(options.listen, options.insecure, trace)))
    except LockstepError as error:
        sys.exit(f"lockstep-{service}: {error.message}")
    sys.exit(code)
