"""Tests a rank that fails or is killed: the caller learns where and why, and no process is left in a collective."""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.errors import InternalError, Reason, Unavailable
from tests.e2e.forked.processes import Forked, preload, start_service
from tests.support import PATIENCE_S, descendants, ending, raises
from tests.trainer import faulty_trainer
from tests.trainer.deployment import deployed
from tests.trainer.faulty_trainer import DEADLY_TEMPERATURE, FAULTY_TEMPERATURE


@contextlib.contextmanager
def forked(command: Sequence[str], log: Path) -> Iterator[Forked]:
    """Runs the trainer as a fork of what has imported the one that is lent."""
    preload("services.trainer")
    _, _, module, *arguments = command
    with ending(process := start_service(module, arguments, log)):
        yield process


async def ended(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor, event = os.pidfd_open(pid), asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, event.set)
        try:
            await event.wait()
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


async def test_failure_of_one_rank_reaches_the_caller_and_ends_all(trainer_files: Path) -> None:
    async with deployed(faulty_trainer.__name__, trainer_files, forked) as trainer:
        await trainer.open(collective_timeout_s=2 * PATIENCE_S)
        await trainer.publish()
        assert (await trainer.train(trainer.batch())).version == 1
        await trainer.publish()
        processes = [trainer.pid, *descendants(trainer.pid)]
        assert len(processes) == 3  # the launcher and two ranks
        with pytest.raises(InternalError) as caught:
            await trainer.train(trainer.batch(), temperature=FAULTY_TEMPERATURE)
        # The other rank would sit in its all-gather beyond the call's deadline; rank 1's answer needs no one else.
        error = caught.value
        assert error.reason is Reason.RANK_FAILED
        assert (error.metadata["rank"], error.metadata["host"]) == ("1", os.uname().nodename)
        assert "ZeroDivisionError: injected on purpose" in error.message
        assert "_fails_on_rank_1" in error.metadata["traceback"]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*map(ended, processes))
        with pytest.raises(Unavailable):
            await trainer.call(TrainerService.GetInfo, pb.GetInfoRequest())


@pytest.mark.long  # test_lost_ranks.py has lost ranks that need no torch, and test_launcher.py how others end with one
async def test_a_killed_rank_is_the_reason_that_the_caller_gets(trainer_files: Path) -> None:
    async with deployed(faulty_trainer.__name__, trainer_files, forked) as trainer:
        await trainer.open(collective_timeout_s=2 * PATIENCE_S)
        await trainer.publish()
        processes = [trainer.pid, *descendants(trainer.pid)]
        with raises(InternalError, reason=Reason.RANK_FAILED):
            await trainer.train(trainer.batch(), temperature=DEADLY_TEMPERATURE)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*map(ended, processes))
