"""Starts two ranks that each say who they are, and wait: `python -m tests.trainer.toy_ranks METHOD`."""

import json
import os
import signal
import sys

from services.common import process
from services.common.rpc.command import REFUSED
from services.trainer import command

EXIT_CODE = 5
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a group is asked twice, once by way of the launcher
    sys.exit(EXIT_CODE)


def work() -> None:
    """Prints who this rank is, and waits; rank 0 ends with a code of its own when it is asked to, or as refused."""
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(REFUSED))
    says = {"pid": os.getpid(), **{name: os.environ[name] for name in NAMES}}
    os.write(1, f"{json.dumps(says)}\n".encode())
    while True:
        signal.pause()


process._GRACE_S = 0.2  # in a spawned rank too
if __name__ == "__main__":
    command._ANSWER_S = 0.2
    command.import_before_fork = lambda *_: None  # these ranks need no torch
    command._serve_store = lambda listener: listener
    command.may_fork = lambda: sys.argv[1] == "fork"
    sys.exit(command.run_ranks(2, work))
