"""Ends a run: exports the policy and closes the run on services that keep running."""

import logging
from typing import Any

from google.protobuf.message import Message
from lockstep.reward.v1 import reward_pb2
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceStub
from lockstep.rollout.v1 import rollout_pb2
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceStub

from services.common.errors import LockstepError
from services.common.rpc.client import Client, Method
from services.common.tasks import gather
from services.coordinator.observe.outcome import Outcome
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.run import Run
from services.coordinator.services.clients.trainer import Trainer
from services.coordinator.services.launch import Addresses

log = logging.getLogger(__name__)


async def finish(run: Run, trainer: Trainer) -> Outcome:
    """Exports the final policy if the run has done all its steps and `checkpoint.export_at_end` is set."""
    directory, export_path = run.config.run_dir, None
    if run.version >= run.num_steps and run.config.checkpoint.export_at_end:
        export_path = (directory / "model").absolute()
        if not run.record.set_aside_export(export_path, run.version):
            with run.phase(Phase.CHECKPOINTING):
                await trainer.export(str(export_path))
            run.record.record_export(export_path, run.version)
    return Outcome(directory, run.version, run.num_steps, run.record.evaluations(), export_path)


async def close_run(run: Run, addresses: Addresses) -> None:
    """Tells services that were given by address to free what they hold for `run`, which ended without an error.

    If a service fails to do so, it is only logged: the next run opened there replaces this one, so nothing is lost.
    """
    id_of = {"run_id": run.run_id}
    trainers = {addresses.trainer, addresses.reference, addresses.critic}
    kinds = (
        ([addresses.reward], RewardServiceStub, RewardService.CloseRun, reward_pb2.CloseRunRequest(**id_of)),
        (trainers, TrainerServiceStub, TrainerService.CloseRun, trainer_pb2.CloseRunRequest(**id_of)),
        (addresses.rollout, RolloutServiceStub, RolloutService.CloseRun, rollout_pb2.CloseRunRequest(**id_of)),
    )
    given = [
        (Client(at, stub, addresses.transport), method, request)
        for all_at, stub, method, request in kinds
        for at in all_at
        if at and at not in addresses.started
    ]
    await gather(_close(run, client, method, request) for client, method, request in given)


async def _close(run: Run, client: Client, method: Method[Any, Message], request: Any) -> None:
    try:
        await client.call(method, request, timeout_s=run.config.timeouts.info_s)
    except LockstepError as error:
        log.warning("run %s may still be open at %s: %s", run.run_id, client.address, error.message)
    finally:
        await client.close()
