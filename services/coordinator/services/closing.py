"""Ends a run: exports the policy and closes the run on services that keep running."""

import logging
from typing import Any

from lockstep.reward.v1 import reward_pb2, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.errors import LockstepError
from services.common.rpc.client import Client
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
    requests: list[tuple[str, type, Any]] = [
        (addresses.reward, reward_pb2_grpc.RewardServiceStub, reward_pb2.CloseRunRequest(**id_of)),
        *((at, trainer_pb2_grpc.TrainerServiceStub, trainer_pb2.CloseRunRequest(**id_of)) for at in trainers),
        *((at, rollout_pb2_grpc.RolloutServiceStub, rollout_pb2.CloseRunRequest(**id_of)) for at in addresses.rollout),
    ]
    clients = [
        (Client(at, stub, addresses.transport), request)
        for at, stub, request in requests
        if at and at not in addresses.started
    ]
    await gather(_close(client, request, run.config.timeouts.info_s) for client, request in clients)


async def _close(client: Client, request: Any, timeout_s: float) -> None:
    try:
        await client.call("CloseRun", request, timeout_s=timeout_s)
    except LockstepError as error:
        log.warning("run %s may still be open at %s: %s", request.run_id, client.address, error.message)
    finally:
        await client.close()
