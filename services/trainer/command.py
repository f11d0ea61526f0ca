"""Implements the command `lockstep-trainer --listen HOST:PORT`, and `torchrun -m services.trainer`.

The former starts the ranks of a trainer on one host, forked from a process that has imported their modules once.
"""

import argparse
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

from services.common import process
from services.common.memory import killed_hint
from services.common.rpc.command import REFUSED, ServeOptions, exit_on_error, serve_from_command_line

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_ENDING = (signal.SIGTERM, signal.SIGINT)
# When another rank ends first, rank 0 gets this long to tell its caller which one, and why.
_ANSWER_S = 20.0


def preload() -> None:
    """Imports what ranks need, before they are forked."""
    process.import_before_fork("torch", "services.trainer.ranks.rank")


def run_ranks(num_ranks: int, run_rank: Callable[[], None]) -> int:
    """Calls `run_rank` in `num_ranks` processes with torchrun's variables. When one process ends, ends all others.

    When another rank ends, rank 0 has 20 s to notice it, answer the current call with RANK_FAILED and exit.
    SIGTERM and SIGINT are passed on to rank 0, which shuts down in order. If this process is killed, the ranks end too.

    Returns:
        The exit code of the rank that ended first, or 1 if a signal ended it.
    """
    process.configure_logging("trainer")
    preload()
    method = "fork" if process.may_fork() else "spawn"
    if method == "spawn":
        resource_tracker.ensure_running()  # spawning would start it after signals are blocked, and it unblocks them
    listener = socket.create_server((_HOST, 0))
    context: Any = multiprocessing.get_context(method)  # BaseContext has no Process
    shared = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": listener.getsockname()[1],
        "TORCHELASTIC_USE_AGENT_STORE": True,  # this process serves the store, as torchrun does
    }
    ranks = [
        context.Process(target=_rank, args=(rank, shared, os.getpid(), run_rank), name=f"rank {rank}")
        for rank in range(num_ranks)
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # here and in the ranks, until handlers are set
    for rank in ranks:
        rank.start()
    for number in _ENDING:
        signal.signal(number, lambda *_: ranks[0].terminate())
    store = _serve_store(listener)  # after the fork, with signals blocked in its threads
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    ended = wait([rank.sentinel for rank in ranks])
    first = next(rank for rank in ranks if rank.sentinel in ended)
    first.join()
    ranks[0].join(_ANSWER_S)
    del store
    for rank in ranks:
        rank.kill()
        rank.join()
    if first.exitcode and (first is not ranks[0] or first.exitcode != REFUSED):  # rank 0 has said why it was refused
        hint = f"; {killed_hint('trainer.max_tokens_per_microbatch')}" if first.exitcode == -signal.SIGKILL else ""
        log.error("%s ended with exit code %d; all other ranks were ended%s", first.name, first.exitcode, hint)
    return first.exitcode if first.exitcode >= 0 else 1


def _serve_store(listener: socket.socket) -> object:
    """Serves the store where the ranks meet. Ranks may connect to the listener before this is called, and wait."""
    import torch.distributed as dist

    host, port = listener.getsockname()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _rank(rank: int, shared: dict[str, object], launcher: int, run_rank: Callable[[], None]) -> None:
    variables = shared | {"RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()})
    for number in _ENDING:
        # Only rank 0 reacts to signals. It may need the other ranks to shut down, so they end after it.
        signal.signal(number, signal.SIG_IGN if rank else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    process.exit_with(launcher)
    run_rank()


def serve(args: Sequence[str] | None, threads_per_rank: int | None) -> None:
    """Runs one rank, given torchrun's variables. It is not in __main__, which spawned ranks cannot import from."""
    process.keep_compiled_code()  # a rank of torchrun has no launcher of ours that did

    async def run(options: ServeOptions) -> int:
        from services.trainer.ranks.rank import run as run_rank  # late: it imports torch

        return await run_rank(options, threads_per_rank)

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
            process.require_extra("trainer")
        sys.exit(run_ranks(own.nproc_per_node, partial(serve, args, own.threads_per_rank)))
