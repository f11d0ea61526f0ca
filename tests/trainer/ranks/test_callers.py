"""Callers of a trainer that give up, come late, or call while another call is in progress."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from torch.distributed import DistError

from services.common import batches
from services.common.errors import DataLoss, InternalError, PreconditionFailed, Reason
from services.common.weights.store import StoreAddress, StoreClient
from tests.support import PATIENCE_S, raises
from tests.trainer.ranks.crew import Service


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
    with raises(PreconditionFailed):
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
    assert [worker.calls for worker in crew.workers] == [["send", "begin", "add", "apply"]] * 2
    assert await service.version() == 1


async def test_a_batch_that_changed_on_the_way_is_not_trained_on(service: Service) -> None:
    def flip_a_sign(message: pb.TrainRequest) -> pb.TrainRequest:
        if message.WhichOneof("part") != "frame":
            return message
        frame = bytearray(message.frame)
        advantage = np.float32(batches.decode([message.frame])["advantages"][0][0].as_py())
        frame[frame.index(advantage.tobytes()) + 3] ^= 0x80
        return pb.TrainRequest(frame=bytes(frame))

    with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
        await service.train(flip_a_sign)
    assert (await service.train()).version == 1
    assert [worker.calls for worker in service.crew.workers] == [["send", "begin", "drop", "begin", "add", "apply"]] * 2


async def test_weights_are_not_sent_as_the_version_before_a_batch_in_progress(service: Service) -> None:
    crew = service.crew
    crew.close_gates()
    training = asyncio.create_task(service.train())
    await asyncio.to_thread(crew.workers[1].entered.wait)
    sending = asyncio.create_task(service.send())
    await service.version()  # the server has read what came before
    crew.open_gates()
    assert (await training).version == 1
    with raises(PreconditionFailed, reason=Reason.STALE_STAMP):
        await sending
    assert [worker.calls for worker in crew.workers] == [["send", "begin", "add", "apply"]] * 2


@pytest.mark.parametrize("disturbs", ["save", "close"])
async def test_background_save_lets_train_go_on_and_what_would_disturb_it_wait(
    service: Service, tmp_path: Path, disturbs: str
) -> None:
    rank_0 = service.crew.workers[0]
    rank_0.entered.clear()
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
    assert rank_0.calls == ["send", "save 0", "begin", "add", "apply"]
    rank_0.writers.set()
    assert (await first).manifest_digest == "m"
    await waiting
    assert rank_0.calls == ["send", "save 0", "begin", "add", "apply", {"save": "save 1", "close": "close"}[disturbs]]


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
    with raises(PreconditionFailed, reason=Reason.STALE_STAMP):
        await service.save(tmp_path / "a", version=0)
    assert not list(tmp_path.glob("*a*"))
