"""The ranks of a trainer on one host: forked from a process that has imported once what is slow to import."""

import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

from services.common.process import configure_logging, exit_with, import_before_fork

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_ENDING = (signal.SIGTERM, signal.SIGINT)


def run_ranks(num_ranks: int, serve: Callable[[], None]) -> int:
    """Calls `serve` in `num_ranks` processes with torchrun's variables, and ends all of them when one ends.

    SIGTERM and SIGINT go to rank 0, which ends when it has finished. If this process is killed, the ranks end too.

    Returns:
        The exit code of the rank that ended first, 1 if that was a signal.
    """
    configure_logging("trainer")
    import_before_fork("torch")
    method = _method()
    if method == "fork":
        import_before_fork("services.trainer.ranks.rank")
    else:
        resource_tracker.ensure_running()  # spawning would start it later, and it unblocks signals
    listener = socket.create_server((_HOST, 0))
    context: Any = multiprocessing.get_context(method)  # Process is not of the base class
    shared = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": listener.getsockname()[1],
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is here, as it is torchrun's
    }
    ranks = [
        context.Process(target=_rank, args=(rank, shared, os.getpid(), serve), name=f"rank {rank}")
        for rank in range(num_ranks)
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # here and in the ranks, until each knows what to do
    for rank in ranks:
        rank.start()
    for number in _ENDING:
        signal.signal(number, lambda *_: ranks[0].terminate())
    store = _serve_store(listener)  # its threads begin after the fork, and leave signals to this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    ended = wait([rank.sentinel for rank in ranks])
    del store
    first = next(rank for rank in ranks if rank.sentinel in ended)
    first.join()
    for rank in ranks:
        rank.kill()
        rank.join()
    if first.exitcode:
        log.error("%s ended with exit code %d, and so do all", first.name, first.exitcode)
    return first.exitcode if first.exitcode >= 0 else 1


def _serve_store(listener: socket.socket) -> object:
    """Where the ranks meet. They wait, connected to the listener, until it is there."""
    import torch.distributed as dist

    host, port = listener.getsockname()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _method() -> str:
    """Of multiprocessing. CUDA does not survive a fork."""
    import torch

    return "spawn" if torch.backends.cuda.is_built() else "fork"


def _rank(rank: int, shared: dict[str, object], launcher: int, serve: Callable[[], None]) -> None:
    variables = shared | {"RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()})
    for number in _ENDING:
        # Rank 0 ends first, in its own time: the others, which it may be waiting for, only when it has.
        signal.signal(number, signal.SIG_IGN if rank else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    exit_with(launcher)
    serve()
