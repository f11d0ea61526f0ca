"""Runs a rank of a trainer of two hosts without torch: `python -m tests.trainer.toy_nodes serve`, or `follow ADDRESS`.

Rank 0 serves: it prints its address, then that all ranks are there, and ends in order when it is given a line. Rank 1
follows it.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from services.common.process import configure_logging
from services.trainer.ranks import calls as ranks_module
from services.trainer.ranks.calls import Message, Ranks, RanksAddress, follow, rank_command

# These replace 5 s and 30 s. On a busy machine, the thread that answers may have to wait for a second or two.
HEARTBEAT_MS, SILENCE_MS = 400, 4_000
LOST = 3


@contextlib.contextmanager
def toy(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts one of the two ranks, and kills it at the end of the block."""
    command, pipe = [sys.executable, "-m", "tests.trainer.toy_nodes", *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class Worker:
    """Does the work of rank 1, which can be lost, or of rank 0, which then waits for rank 1 as in a collective."""

    def __init__(self, rank: int):
        self.rank = rank
        self.gate = threading.Event()
        self.calls: list[str] = []

    @rank_command
    def echo(self, *, value: int) -> Message:
        return Message({"value": value})

    @rank_command
    def begin_batch(self, **_: Any) -> None:
        self.calls.append("begin")

    @rank_command
    def add_block(self, **_: Any) -> None:
        self.calls.append("add")

    @rank_command
    def apply_batch(self, **_: Any) -> Message:
        self.calls.append("apply")
        return Message({"metrics": {}})

    @rank_command
    def lose_1(self, *, number: int) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), number)
        self.gate.wait()

    @rank_command
    def break_with_1(self) -> None:
        """Kills rank 1; the other rank fails as in a collective that a rank has left."""
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("connection closed by peer")

    @rank_command
    def keep_1_busy(self, *, duration_s: float) -> Message:
        """Keeps rank 1 busy, with the interpreter's lock held all the time, as some libraries do."""
        if self.rank == 1:
            ctypes.PyDLL(None).usleep(int(duration_s * 1e6))
        return Message({"busy": self.rank == 1})


async def _serve() -> None:
    served = Ranks(2, "127.0.0.1", lambda why: None)
    threading.Thread(target=follow, args=(0, served.address, Worker(0)), daemon=True).start()
    os.write(1, f"{served.address.pack()}\n".encode())
    await served.wait_for_all()
    os.write(1, b"there\n")
    await asyncio.to_thread(sys.stdin.readline)
    await served.end()
    os._exit(0)


if __name__ == "__main__":
    configure_logging("toy")
    ranks_module._HEARTBEAT_MS, ranks_module._SILENCE_MS = HEARTBEAT_MS, SILENCE_MS
    if sys.argv[1] == "serve":
        asyncio.run(_serve())
    else:
        sys.exit(0 if follow(1, RanksAddress.unpack(sys.argv[2]), Worker(1)) else LOST)
