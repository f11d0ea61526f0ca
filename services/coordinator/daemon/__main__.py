"""Starts the daemon: `lockstep coordinator serve --listen HOST:PORT [--runs-dir DIR]`, or `lockstep-coordinator`."""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from services.common.rpc.command import ServeOptions, serve_from_command_line
from services.common.rpc.server import Server
from services.common.rpc.tls import Transport

# How long watchers may take to receive the last events of their runs, which have ended by then.
_GRACE_S = 10.0


async def run(runs_dir: Path, options: ServeOptions) -> int:
    """Serves until a signal, then lets each run finish its current step. Returns the exit code."""
    from lockstep.coordinator.v1 import coordinator_pb2_grpc

    from services.coordinator.daemon.history import split_by_run
    from services.coordinator.daemon.runs import NAME, CoordinatorServicer, Runs

    split_by_run()
    server, runs = Server(options.trace, options.tls, options.metrics.registry), Runs(runs_dir)
    servicer = CoordinatorServicer(runs, Transport(options.tls, options.insecure))
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.grpc)
    options.metrics.serve()
    await server.start(options.listen, [NAME], insecure=options.insecure)
    return await server.serve(grace_s=_GRACE_S, drain=runs.drain)


def main(args: Sequence[str] | None = None) -> None:
    """Parses the command line and serves."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--runs-dir", type=Path, default=Path("runs"), help="directory for the files of all runs")
    runs_dir = own.parse_known_args(args)[0].runs_dir
    serve_from_command_line("coordinator", functools.partial(run, runs_dir), args, parents=[own])


if __name__ == "__main__":
    main()
