"""Commands to all ranks, over real ZeroMQ, with workers that do as the test says; and callers that give up."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import PolicyStamp
from torch.distributed import DistError
from torch.distributed.checkpoint import CheckpointException

from services.common import batch as batches
from services.common.errors import Aborted, DataLoss, InternalError, PreconditionFailed, Reason
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.common.weights.store import ServedStore, StoreAddress, StoreClient
from services.trainer.ranks.calls import Message, Ranks, follow, rank_command
from services.trainer.ranks.sockets import RanksAddress, connect
from services.trainer.servicer import NAME, TrainerServicer
from tests.support import PATIENCE_S, make_batch
from tests.trainer.deployment import messages

DIGEST = "0" * 32


class FakeWorker:
    """Stands for the torch side, which is slow and cannot be stopped at a chosen moment."""

    def __init__(self, rank: int):
        self.rank = rank
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.writers = threading.Event()
        self.write_error: Exception | None = None
        self.block_error: Exception | None = None
        self.added, self.dropped = threading.Event(), threading.Event()
        self.crash_error: BaseException = ZeroDivisionError("boom")

    @rank_command
    def echo(self, *, value: Any, own: Any = None, frames: list[bytes] = ()) -> Message:
        return Message({"rank": self.rank, "value": value, "own": own}, [*frames, b"from the rank"])

    @rank_command
    def refuse(self) -> None:
        if self.rank == 1:
            raise PreconditionFailed("not now", reason=Reason.NOT_JOINED, field="f")

    @rank_command
    def give_up(self) -> None:
        if self.rank == 0:
            raise Aborted("another member gave up")
        raise PreconditionFailed("the cause")

    @rank_command
    def refuse_while_another_hangs(self) -> None:
        self.refuse()
        self.gate.wait()

    @rank_command
    def crash(self) -> None:
        if self.rank == 1:
            raise self.crash_error
        self.gate.wait()

    @rank_command
    def answer_with_no_json(self) -> Message:
        return Message({"value": object()})

    @rank_command
    def open(self, **_: Any) -> Message:
        return Message({"data_rank": self.rank}, [b""])

    @rank_command
    def train(self, **_: Any) -> Message:
        self.entered.set()
        self.gate.wait()
        self.calls.append("train")
        return Message({"metrics": {"loss": 0.5}})

    @rank_command
    def begin_blocks(self, **_: Any) -> None:
        self.calls.append("begin")

    @rank_command
    def add_block(self, **_: Any) -> None:
        if self.block_error is not None:
            raise self.block_error
        self.calls.append("add")
        self.added.set()

    @rank_command
    def apply_blocks(self, **_: Any) -> Message:
        self.calls.append("apply")
        return Message({"metrics": {"loss": 0.5}})

    @rank_command
    def drop_blocks(self) -> None:
        self.calls.append("drop")
        self.dropped.set()

    @rank_command
    def save(self, *, state: dict[str, Any], **_: Any) -> Message:
        self.calls.append(f"save {state['version']}")
        return Message({})  # goes on in the background

    def saved(self) -> dict[str, Any]:
        """The end of the background save, which the test lets come."""
        self.entered.set()
        self.writers.wait()
        if self.write_error is not None:
            raise self.write_error
        return {"num_bytes": 7, "manifest_digest": "m"}

    def kill_epoch(self) -> None:
        pass

    @rank_command
    def close(self) -> None:
        self.calls.append("close")

    @rank_command
    def join(self, **_: Any) -> Message:
        return Message({"plan_digest": "p"})

    @rank_command
    def send(self, **_: Any) -> Message:
        self.calls.append("send")
        return Message({"digest": DIGEST, "num_bytes": 1, "duration_s": 0.1, "cost": {}})


class Crew:
    def __init__(self) -> None:
        self.failures: list[str] = []
        self.workers = [FakeWorker(rank) for rank in range(2)]
        self.ranks = Ranks(2, "127.0.0.1", self.failures.append)
        for worker in self.workers:
            threading.Thread(target=follow, args=(worker.rank, self.ranks.address, worker), daemon=True).start()

    def close_gates(self) -> None:
        for worker in self.workers:
            worker.gate.clear()
            worker.entered.clear()

    def open_gates(self) -> None:
        for worker in self.workers:
            worker.gate.set()
            worker.writers.set()


@pytest.fixture
async def crew() -> AsyncIterator[Crew]:
    crew = Crew()
    async with asyncio.timeout(PATIENCE_S):
        await crew.ranks.wait_for_all()
    yield crew
    crew.open_gates()


async def test_each_rank_gets_its_own_part_and_answers_in_rank_order(crew: Crew) -> None:
    parts = [Message({"own": rank}, [bytes([rank])]) for rank in range(2)]
    answers = await crew.ranks.call(FakeWorker.echo, parts, value={"x": [1.5, None]})
    assert [answer.body for answer in answers] == [
        {"rank": rank, "value": {"x": [1.5, None]}, "own": rank} for rank in range(2)
    ]
    assert [list(answer.frames) for answer in answers] == [[bytes([rank]), b"from the rank"] for rank in range(2)]


async def test_typed_error_of_one_rank_is_raised_and_the_ranks_go_on(crew: Crew) -> None:
    with pytest.raises(PreconditionFailed) as caught:
        await crew.ranks.call(FakeWorker.refuse)
    assert (caught.value.reason, caught.value.metadata) == (Reason.NOT_JOINED, {"field": "f"})
    assert (await crew.ranks.call(FakeWorker.echo, value=1))[1].body["value"] == 1
    assert not crew.failures


async def test_the_cause_is_raised_and_not_that_others_gave_up_for_it(crew: Crew) -> None:
    with pytest.raises(PreconditionFailed, match="the cause"):
        await crew.ranks.call(FakeWorker.give_up)


async def test_crash_of_one_rank_does_not_wait_for_the_others(crew: Crew) -> None:
    crew.close_gates()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError) as caught:
            await crew.ranks.call(FakeWorker.crash)
    assert caught.value.reason is Reason.RANK_FAILED
    assert caught.value.metadata["rank"] == "1"
    assert "in crash" in caught.value.metadata["traceback"]
    assert len(crew.failures) == 1
    # Nothing is asked of such ranks again.
    with pytest.raises(InternalError, match="boom"):
        await crew.ranks.call(FakeWorker.echo, value=1)


@pytest.mark.parametrize("error", [CheckpointException("read", {}), SystemExit(1), KeyboardInterrupt()])
async def test_whatever_ends_a_command_is_an_answer(crew: Crew, error: BaseException) -> None:
    crew.close_gates()
    crew.workers[1].crash_error = error
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match=type(error).__name__) as caught:
            await crew.ranks.call(FakeWorker.crash)
    assert caught.value.reason is Reason.RANK_FAILED
    assert len(crew.failures) == 1


async def test_an_answer_that_cannot_be_sent_is_a_failure(crew: Crew) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match="not JSON serializable"):
            await crew.ranks.call(FakeWorker.answer_with_no_json)


async def test_a_method_that_is_not_declared_is_not_called(crew: Crew) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match="KeyError: 'kill_epoch'"):
            await crew.ranks.call(FakeWorker.kill_epoch)


async def test_rank_that_hangs_after_anothers_error_ends_the_trainer(
    crew: Crew,
) -> None:
    crew.close_gates()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InternalError, match=r"\[0\] did not answer"):
            await crew.ranks.call(FakeWorker.refuse_while_another_hangs, grace_s=0.2)
    assert len(crew.failures) == 1


async def test_canceled_call_is_finished_before_the_next(crew: Crew) -> None:
    crew.close_gates()
    call = asyncio.create_task(crew.ranks.call(FakeWorker.train))
    await asyncio.to_thread(crew.workers[1].entered.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    after = asyncio.create_task(crew.ranks.call(FakeWorker.echo, value=2))
    crew.open_gates()
    async with asyncio.timeout(PATIENCE_S):
        assert [answer.body["value"] for answer in await after] == [2, 2]
    assert crew.workers[0].calls == ["train"]


def answer_strangely(address: RanksAddress) -> None:
    """A rank 1 that repeats its hello and its answers, and answers another command first."""
    with connect(1, address) as (connection, _):
        connection.send(b"once more")
        while True:
            call_id, *parts = connection.recv_multipart()
            if not parts[0].startswith(b'{"command"'):
                return
            value = json.loads(parts[0])["arguments"]["value"]
            for answers_to, body in ((b"call 99", "other"), (call_id, value), (call_id, "again")):
                connection.send_multipart([answers_to, *Message({"value": body}).pack()])


async def test_late_and_repeated_messages_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, "127.0.0.1", pytest.fail)
    threading.Thread(target=follow, args=(0, ranks.address, FakeWorker(0)), daemon=True).start()
    threading.Thread(target=answer_strangely, args=(ranks.address,), daemon=True).start()
    async with asyncio.timeout(PATIENCE_S):
        await ranks.wait_for_all()
        for value in range(5):
            answers = await ranks.call(FakeWorker.echo, value=value)
            assert [answer.body["value"] for answer in answers] == [value, value]
    dropped = [record.message for record in caplog.records if "dropped" in record.message]
    assert any("b'call 99'" in line for line in dropped) and any("b'once more'" in line for line in dropped)
    assert len(dropped) >= 5 + 4 + 1


class Service:
    """The real servicer and server over fake workers."""

    def __init__(self, crew: Crew, client: Client, model: Path):
        self.crew, self.client, self.model = crew, client, model

    async def train(self, spoil: Callable[[pb.TrainRequest], pb.TrainRequest] = lambda m: m) -> pb.TrainResponse:
        stamp = PolicyStamp(version=0, digest=DIGEST)
        header = pb.TrainHeader(expected_stamp=stamp, batch_id="b", temperature=1.0)
        frames = list(batches.encode(make_batch(2, 2, stamp)))
        requests = (spoil(message) async for message in messages(pb.TrainRequest, header, frames))
        return await self.client.call(TrainerService.Train, requests, timeout_s=PATIENCE_S)

    async def send(self, *, timeout_s: float = PATIENCE_S) -> PolicyStamp:
        request = pb.SendWeightsRequest(epoch=1, version=0)
        return (await self.client.call(TrainerService.SendWeights, request, timeout_s=timeout_s)).stamp

    def save(self, path: Path, **fields: Any) -> asyncio.Task[pb.SaveCheckpointResponse]:
        request = pb.SaveCheckpointRequest(path=str(path), **fields)
        return asyncio.create_task(self.client.call(TrainerService.SaveCheckpoint, request, timeout_s=PATIENCE_S))

    async def open(self, run_id: str, role: int = pb.ROLE_POLICY, config_json: str = "{}") -> pb.OpenRunResponse:
        request = pb.OpenRunRequest(
            run_id=run_id, config_json=config_json, model_path=str(self.model), bucket_bytes=1024
        )
        request.role = role
        return await self.client.call(TrainerService.OpenRun, request, timeout_s=PATIENCE_S)

    async def version(self) -> int:
        return (await self.client.call(TrainerService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)).stamp.version


@pytest.fixture
async def service(crew: Crew, tmp_path: Path) -> AsyncIterator[Service]:
    server = Server()
    servicer = TrainerServicer(crew.ranks, crew.workers[0], ServedStore("127.0.0.1"))
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    client = Client(f"127.0.0.1:{await server.start('127.0.0.1:0', [NAME])}", trainer_pb2_grpc.TrainerServiceStub)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    request = pb.OpenRunRequest(run_id="r", config_json="{}", model_path=str(tmp_path), bucket_bytes=1024)
    await client.call(TrainerService.OpenRun, request, timeout_s=PATIENCE_S)
    join = pb.JoinWeightGroupRequest()
    join.group.epoch = 1
    await client.call(TrainerService.JoinWeightGroup, join, timeout_s=PATIENCE_S)
    service = Service(crew, client, tmp_path)
    await service.send()
    yield service
    crew.open_gates()
    await client.close()
    await server.grpc.stop(None)


async def test_every_run_has_a_secret_of_its_own(service: Service) -> None:
    async def opened(run_id: str) -> StoreAddress:
        answer = await service.open(run_id)
        return StoreAddress(answer.store_host, answer.store_port, answer.store_secret)

    async def closed(run_id: str) -> None:
        await service.client.call(TrainerService.CloseRun, pb.CloseRunRequest(run_id=run_id), timeout_s=PATIENCE_S)

    first, again = await opened("r"), await opened("r")
    assert first == again  # asked twice, opened once
    member = StoreClient(first, PATIENCE_S)
    second = await opened("s")
    assert (second.host, second.port) == (first.host, first.port)
    with pytest.raises(ConnectionRefusedError, match="does not accept the secret"):
        StoreClient(first, PATIENCE_S)
    with pytest.raises(DistError):
        member.check(["a key"])
    StoreClient(second, PATIENCE_S)
    await closed("r")  # late, which changes nothing
    StoreClient(second, PATIENCE_S)
    await closed("s")
    with pytest.raises(ConnectionRefusedError):
        StoreClient(second, PATIENCE_S)
    assert await opened("s") != second


async def test_no_test_broadcast_disturbs_a_run(service: Service) -> None:
    request = pb.SendTestBroadcastRequest(num_receivers=1, host="127.0.0.1", timeout_s=1.0)
    with pytest.raises(PreconditionFailed, match="run r is open on this trainer"):
        _ = [
            answer
            async for answer in service.client.stream(TrainerService.SendTestBroadcast, request, timeout_s=PATIENCE_S)
        ]
    assert await service.version() == 0


async def test_batch_whose_caller_gave_up_is_applied_once(service: Service) -> None:
    crew = service.crew
    crew.close_gates()
    call = asyncio.create_task(service.train())
    for worker in crew.workers:
        await asyncio.to_thread(worker.entered.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # The retry arrives while the ranks still work on the first: it waits, and is answered with what they did.
    retry = asyncio.create_task(service.train())
    crew.open_gates()
    answer = await retry
    assert (answer.version, answer.replayed, answer.metrics["loss"]) == (1, True, 0.5)
    assert [worker.calls for worker in crew.workers] == [["send", "train"]] * 2
    assert await service.version() == 1


async def test_a_batch_that_changed_on_the_way_is_not_trained_on(service: Service) -> None:
    def flip_a_sign(message: pb.TrainRequest) -> pb.TrainRequest:
        if message.WhichOneof("part") != "frame":
            return message
        frame = bytearray(message.frame)
        advantage = np.float32(batches.decode([message.frame])["advantages"][0][0].as_py())
        frame[frame.index(advantage.tobytes()) + 3] ^= 0x80
        return pb.TrainRequest(frame=bytes(frame))

    with pytest.raises(DataLoss, match="changed on the way") as caught:
        await service.train(flip_a_sign)
    assert caught.value.reason is Reason.CORRUPT_TRANSFER
    assert (await service.train()).version == 1
    assert [worker.calls for worker in service.crew.workers] == [["send", "train"]] * 2


async def test_weights_are_not_sent_as_the_version_before_a_batch_in_progress(service: Service) -> None:
    crew = service.crew
    crew.close_gates()
    training = asyncio.create_task(service.train())
    await asyncio.to_thread(crew.workers[1].entered.wait)
    sending = asyncio.create_task(service.send())
    await service.version()  # the server has read what came before
    crew.open_gates()
    assert (await training).version == 1
    with pytest.raises(PreconditionFailed) as caught:
        await sending
    assert caught.value.reason is Reason.STALE_STAMP
    assert [worker.calls for worker in crew.workers] == [["send", "train"]] * 2


@pytest.mark.parametrize("disturbs", ["save", "close"])
async def test_background_save_lets_train_go_on_and_what_would_disturb_it_wait(
    service: Service, tmp_path: Path, disturbs: str
) -> None:
    rank_0 = service.crew.workers[0]
    first = service.save(tmp_path / "a", version=0)
    await asyncio.to_thread(rank_0.entered.wait)
    assert (await service.train()).version == 1
    if disturbs == "save":
        waiting = service.save(tmp_path / "b")
    else:
        request = pb.CloseRunRequest(run_id="r")
        waiting = asyncio.create_task(service.client.call(TrainerService.CloseRun, request, timeout_s=PATIENCE_S))
    await service.version()  # the server has read what came before
    assert not first.done() and not waiting.done()
    assert rank_0.calls == ["send", "save 0", "train"]
    rank_0.writers.set()
    assert (await first).manifest_digest == "m"
    await waiting
    assert rank_0.calls == ["send", "save 0", "train", {"save": "save 1", "close": "close"}[disturbs]]


async def test_failed_background_save_is_its_error_and_the_trainer_goes_on(service: Service, tmp_path: Path) -> None:
    rank_0 = service.crew.workers[0]
    rank_0.write_error = InternalError("no space left on device")
    rank_0.writers.set()
    with pytest.raises(InternalError, match="no space left"):
        await service.save(tmp_path / "a")
    assert (await service.train()).version == 1
    rank_0.write_error = None
    await service.save(tmp_path / "a")
    assert not service.crew.failures


async def test_another_version_than_asked_for_is_not_saved(service: Service, tmp_path: Path) -> None:
    await service.train()
    with pytest.raises(PreconditionFailed) as caught:
        await service.save(tmp_path / "a", version=0)
    assert caught.value.reason is Reason.STALE_STAMP
    assert not list(tmp_path.glob("*a*"))
