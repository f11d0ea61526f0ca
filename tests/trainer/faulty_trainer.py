"""A trainer whose rank 1 raises or is killed in an update with FAULTY_TEMPERATURE or DEADLY_TEMPERATURE."""

import os
import signal
from typing import Any

from services.trainer import command
from services.trainer.fsdp.backend import FsdpBackend

FAULTY_TEMPERATURE, DEADLY_TEMPERATURE = 13.0, 14.0
_accumulate = FsdpBackend.accumulate


def _fails_on_rank_1(self: FsdpBackend, microbatches: Any, temperature: float, *arguments: Any, **named: Any) -> Any:
    if os.environ["RANK"] == "1" and temperature == FAULTY_TEMPERATURE:
        raise ZeroDivisionError("injected on purpose")
    if os.environ["RANK"] == "1" and temperature == DEADLY_TEMPERATURE:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return _accumulate(self, microbatches, temperature, *arguments, **named)  # rank 0 waits here, in a collective


def main() -> None:
    FsdpBackend.accumulate = _fails_on_rank_1  # before it forks
    command.main()
