"""Tests ranks of other hosts, each as a process: none outlives rank 0, and rank 0 outlives none of them."""

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp

from services.common.batches import BlockCutter, blocks_of
from services.common.config.trainer import TrainerConfig
from services.common.errors import InternalError, Reason
from services.trainer.backend import Role
from services.trainer.checkpoint.manifest import TrainState
from services.trainer.contract import OpenRole
from services.trainer.ranks import calls as ranks_module
from services.trainer.ranks.calls import Ranks, RanksAddress
from services.trainer.stream import BatchTraining
from tests.support import PATIENCE_S, free_port, make_batch, raises
from tests.trainer.rank_threads import following
from tests.trainer.toy_nodes import HEARTBEAT_MS, LOST, SILENCE_MS, Worker, toy


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_HEARTBEAT_MS", HEARTBEAT_MS)
    monkeypatch.setattr(ranks_module, "_SILENCE_MS", SILENCE_MS)


class Trainer:
    """Runs rank 0 in this process; a test starts rank 1 in a process of its own."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.failed = asyncio.Event()
        self.ranks = Ranks(2, "127.0.0.1", self._on_failure)
        self.own = Worker(0)

    def _on_failure(self, why: str) -> None:
        self.failures.append(why)
        self.failed.set()


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer()
    async with following(trainer.ranks, trainer.own):
        yield trainer
        trainer.own.gate.set()


# SIGKILL stands for a process that ends, SIGSTOP for a host that does not answer any more.
# Either is noticed in the same places, so a silence, which takes seconds, is only waited for between commands and by a
# rank that follows.
gone = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
ended = pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])


@ended
async def test_a_rank_that_is_lost_in_a_command_is_its_failure(trainer: Trainer, number: int) -> None:
    with toy("follow", trainer.ranks.address.pack()):
        async with asyncio.timeout(PATIENCE_S):
            await trainer.ranks.wait_for_all()
            with pytest.raises(InternalError, match=r"rank 1 on .* is gone") as caught:
                await trainer.ranks.call(Worker.lose_1, number=number)
    assert caught.value.reason is Reason.RANK_FAILED
    assert caught.value.metadata == {"rank": "1", "host": socket.gethostname()}
    assert trainer.failures == [caught.value.message]


async def test_the_failure_is_the_lost_rank_and_not_what_its_loss_did_to_another(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_LOSS_S", PATIENCE_S)
    with toy("follow", trainer.ranks.address.pack()):
        async with asyncio.timeout(PATIENCE_S):
            await trainer.ranks.wait_for_all()
            with pytest.raises(InternalError, match=r"rank 1 on .* is gone"):
                await trainer.ranks.call(Worker.break_with_1)
    assert len(trainer.failures) == 1


@gone
async def test_a_rank_that_is_lost_between_commands_is_the_failure_of_all(trainer: Trainer, number: int) -> None:
    with toy("follow", trainer.ranks.address.pack()) as rank:
        async with asyncio.timeout(PATIENCE_S):
            await trainer.ranks.wait_for_all()
            assert [answer.body["value"] for answer in await trainer.ranks.call(Worker.echo, value=1)] == [1, 1]
            rank.send_signal(number)
            await trainer.failed.wait()
    assert len(trainer.failures) == 1
    with raises(InternalError, reason=Reason.RANK_FAILED):
        await trainer.ranks.call(Worker.echo, value=2)


@ended
async def test_a_rank_that_is_lost_between_blocks_fails_the_batch(trainer: Trainer, number: int) -> None:
    stamp = PolicyStamp(version=0, digest="d")
    batch = make_batch(3, 2, stamp)
    header = pb.TrainHeader(expected_stamp=stamp, batch_id="b", temperature=1.0, tokens_per_block=1)
    answer = pb.OpenRunResponse(model_card=ModelCard(files={"config.json": b'{"vocab_size": 64}'}))
    opened = OpenRole(Role.POLICY, "", TrainerConfig(num_ranks=2), answer, [0, 1], TrainState(0, "", {}), digest="d")
    training = BatchTraining(trainer.ranks, header, opened)
    with toy("follow", trainer.ranks.address.pack()) as rank:
        async with asyncio.timeout(PATIENCE_S):
            await trainer.ranks.wait_for_all()
            await training.begin()
            first, second, _ = blocks_of(batch, BlockCutter(1))
            await training.add(first)
            rank.send_signal(number)
            await trainer.failed.wait()
            with raises(InternalError, reason=Reason.RANK_FAILED):
                await training.add(second)
            with raises(InternalError, reason=Reason.RANK_FAILED):
                await training.apply()
    assert trainer.own.calls == ["begin", "add"]


async def test_a_rank_that_never_comes_is_named(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_COMING_S", 3.0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match=r"ranks \[1\] did not connect within 3 s"):
            await trainer.ranks.wait_for_all()
    assert len(trainer.failures) == 1


async def test_a_rank_that_is_lost_while_others_come_is_no_hang(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_COMING_S", 10.0)
    with toy("follow", trainer.ranks.address.pack()) as rank:
        watch = trainer.ranks._socket.get_monitor_socket

        def watch_too_late(events: int) -> object:
            rank.kill()
            rank.wait()
            return watch(events)

        monkeypatch.setattr(trainer.ranks._socket, "get_monitor_socket", watch_too_late)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(InternalError, match=r"rank 1 .*is gone|ranks \[1\] connected, but did not answer"):
                await trainer.ranks.wait_for_all()
    assert len(trainer.failures) == 1


async def test_strangers_who_come_and_go_and_a_busy_rank_are_no_loss(trainer: Trainer) -> None:
    host, port = trainer.ranks.address.url.removeprefix("tcp://").split(":")
    with toy("follow", trainer.ranks.address.pack()):
        async with asyncio.timeout(PATIENCE_S):
            await trainer.ranks.wait_for_all()
            for _ in range(3):
                socket.create_connection((host, int(port))).close()
            answers = await trainer.ranks.call(Worker.keep_1_busy, duration_s=1.2 * SILENCE_MS / 1000)
    assert [answer.body for answer in answers] == [{"busy": False}, {"busy": True}]
    assert trainer.failures == []


@contextlib.contextmanager
def nodes() -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], str]]:
    """Yields rank 0, to which all ranks have connected, rank 1, and rank 0's address."""
    with toy("serve") as rank_0:
        address = rank_0.stdout.readline().strip()
        with toy("follow", address) as rank_1:
            assert rank_0.stdout.readline() == "there\n"
            yield rank_0, rank_1, address


@gone
def test_no_rank_stays_without_rank_0(number: int) -> None:
    with nodes() as (rank_0, rank_1, address):
        rank_0.send_signal(number)
        assert rank_1.wait(PATIENCE_S) == LOST
        (line,) = rank_1.stderr.read().splitlines()
        assert f"rank 1 ends: rank 0 at {RanksAddress.unpack(address).url} is gone" in line


def test_a_rank_that_comes_too_late_ends() -> None:
    _, address = ranks_module.listen("127.0.0.1")
    nobody = RanksAddress(f"tcp://127.0.0.1:{free_port()}", address.key)
    with toy("follow", nobody.pack()) as rank_1:
        assert rank_1.wait(PATIENCE_S) == LOST


def test_the_end_of_a_trainer_is_no_failure() -> None:
    with nodes() as (rank_0, rank_1, _):
        assert [rank.communicate("\n", timeout=PATIENCE_S)[1] for rank in (rank_0, rank_1)] == ["", ""]
        assert (rank_0.returncode, rank_1.returncode) == (0, 0)
