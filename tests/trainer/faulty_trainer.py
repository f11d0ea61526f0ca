"""A trainer whose rank 1 raises or is killed in an update with FAULTY_TEMPERATURE or DEADLY_TEMPERATURE."""

import os
import signal
from typing import Any

import torch

from services.trainer.command import main
from services.trainer.fsdp.backend import FsdpBackend

FAULTY_TEMPERATURE, DEADLY_TEMPERATURE = 13.0, 14.0
_accumulate = FsdpBackend.accumulate


def _fails_on_rank_1(self: FsdpBackend, packs: Any, temperature: float, loss: Any) -> dict[str, torch.Tensor]:
    if os.environ["RANK"] == "1" and temperature == FAULTY_TEMPERATURE:
        raise ZeroDivisionError("injected on purpose")
    if os.environ["RANK"] == "1" and temperature == DEADLY_TEMPERATURE:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return _accumulate(self, packs, temperature, loss)  # rank 0 waits here, in a collective


if __name__ == "__main__":
    FsdpBackend.accumulate = _fails_on_rank_1  # before it forks
    main()
