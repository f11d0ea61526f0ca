"""Tests, over fake workers, that a trainer serves only the coordinator that opened it last."""

import asyncio
from pathlib import Path

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.errors import Aborted, InvalidInput, PreconditionFailed, Reason
from services.common.rpc.fence import new_token
from services.coordinator.clients.trainer import Trainer
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S, raises, until
from tests.trainer.ranks.crew import Service


async def test_who_was_replaced_changes_nothing_more(service: Service, tmp_path: Path) -> None:
    """Tests calls of a coordinator that was replaced, also one that waited for the trainer meanwhile."""
    crew = service.crew
    crew.close_gates()
    training = asyncio.create_task(service.train())
    await asyncio.to_thread(crew.workers[1].entered.wait)
    with new_token():
        opening = asyncio.create_task(service.open("s"))
    await service.version()  # the server has read what came before
    late = service.save(tmp_path / "a")
    await service.version()
    crew.open_gates()
    assert (await training).version == 1
    await opening
    for call in (late, service.send(), service.train(), service.open("r"), service.save(tmp_path / "b")):
        with pytest.raises(
            PreconditionFailed, match="run s was opened on this service and has replaced run r"
        ) as caught:
            await call
        assert caught.value.reason is Reason.RUN_REPLACED
    assert await service.version() == 0
    assert [worker.calls for worker in crew.workers] == [["send", "begin", "add", "apply", "close"]] * 2
    request = pb.CloseRunRequest(run_id="s")
    await service.client.call(TrainerService.CloseRun, request, timeout_s=PATIENCE_S)  # late
    assert crew.workers[0].calls == ["send", "begin", "add", "apply", "close"]


async def test_who_is_replaced_while_it_joins_is_told_so(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """Tests that the coordinator hears who replaced it, and not that its members lost the store."""
    crew = service.crew
    crew.close_gates()
    request = pb.JoinWeightGroupRequest()
    request.group.epoch = 2
    joining = asyncio.create_task(service.client.call(TrainerService.JoinWeightGroup, request, timeout_s=PATIENCE_S))
    await asyncio.to_thread(crew.workers[1].entered.wait)
    with new_token():
        opening = asyncio.create_task(service.open("s"))
    await until(lambda: "run s is opened" in caplog.text)
    for worker in crew.workers:
        worker.join_error = Aborted("the trainer's store is gone")
    crew.open_gates()
    with raises(PreconditionFailed, reason=Reason.RUN_REPLACED):
        await joining
    await opening


async def test_a_run_whose_trainer_has_lost_it_hears_how_to_go_on(service: Service) -> None:
    await service.client.call(TrainerService.CloseRun, pb.CloseRunRequest(run_id="r"), timeout_s=PATIENCE_S)
    trainer = Trainer(service.client.address, make_config())
    with raises(PreconditionFailed, reason=Reason.RUN_NOT_OPEN) as caught:
        await trainer.send(1, 0)
    assert service.client.address in caught.value.message
    assert "the same command resumes the run" in caught.value.message
    await trainer.close()


async def test_roles_share_a_token_and_a_resumed_coordinator_keeps_what_is_held(service: Service) -> None:
    await service.open("r", pb.ROLE_REFERENCE)
    assert (await service.train()).version == 1
    with new_token():
        opened = await service.open("r")
        assert (opened.version, opened.last_batch_id) == (1, "b")
        assert (await service.train()).replayed
    with raises(PreconditionFailed, reason=Reason.RUN_REPLACED):
        await service.train()


async def test_a_save_whose_answer_was_lost_is_answered_again(service: Service, tmp_path: Path) -> None:
    service.crew.open_gates()
    (tmp_path / "a").mkdir()
    with raises(InvalidInput, field="path"):
        await service.save(tmp_path / "a", version=0)
    (tmp_path / "a").rmdir()
    first = await service.save(tmp_path / "a", version=0)
    (tmp_path / "a").mkdir()  # what the ranks would have made
    await service.train()
    assert await service.save(tmp_path / "a", version=0) == first
    assert service.crew.workers[0].calls == ["send", "save 0", "begin", "add", "apply"]
