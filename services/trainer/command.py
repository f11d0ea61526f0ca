"""Implements the command `lockstep-trainer --listen HOST:PORT`, and `torchrun -m services.trainer`."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

from services.common.process import keep_compiled_code, require_extra
from services.common.rpc.command import ServeOptions, exit_on_error, serve_from_command_line
from services.trainer.ranks.launcher import run_ranks


async def _run(options: ServeOptions, *, threads_per_rank: int | None) -> int:
    from services.trainer.ranks.rank import run

    return await run(options, threads_per_rank)


def serve(args: Sequence[str] | None, threads_per_rank: int | None) -> None:
    """Runs one rank, given torchrun's variables. It is not in __main__, which spawned ranks cannot import from."""
    keep_compiled_code()  # a rank of torchrun has no launcher of ours that did
    run = partial(_run, threads_per_rank=threads_per_rank)
    serve_from_command_line("trainer", run, args, parents=[_own_arguments()])


def _own_arguments() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--nproc-per-node", type=int, default=1, help="number of ranks, all on this host")
    own.add_argument(
        "--threads-per-rank",
        type=int,
        metavar="N",
        help="CPU threads of each rank (default: this host's cores divided among its ranks)",
    )
    return own


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command. Under torchrun it runs one rank; otherwise it starts all ranks on this host."""
    parser = _own_arguments()
    own, rest = parser.parse_known_args(args)
    if own.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {own.nproc_per_node}: a trainer has at least one rank")
    if own.threads_per_rank is not None and own.threads_per_rank < 1:
        parser.error(f"--threads-per-rank {own.threads_per_rank}: a rank has at least one thread")
    if "RANK" in os.environ or {"-h", "--help"} & set(rest):
        serve(args, own.threads_per_rank)
    else:
        with exit_on_error("trainer"):
            require_extra("trainer")
        sys.exit(run_ranks(own.nproc_per_node, partial(serve, args, own.threads_per_rank)))
