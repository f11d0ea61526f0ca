"""Opens and closes the services of a run together, and says when a run has nothing left to do."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message
from lockstep.reward.v1 import reward_pb2, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.config.load import AnyConfig
from services.common.config.sft import SftConfig
from services.common.errors import InvalidInput, LockstepError, counted
from services.common.model_card import vocab_size_of
from services.common.rpc.client import Client, Method
from services.common.tasks import gather
from services.coordinator.clients.environment import Environments, open_environments
from services.coordinator.clients.gpus import OwnGpus, gpus_of
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Model, Trainer
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.probes import Tools
from services.coordinator.observe.frontend import Outcome
from services.coordinator.runs.checkpoints import best_if_stalled, comparable_evaluations, require_visible
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.resume import require_steps_after
from services.coordinator.runs.run import Run
from services.coordinator.text.cards import require_same_tokens, require_teacher

log = logging.getLogger(__name__)


async def finish(run: Run[AnyConfig], trainer: Trainer) -> Outcome:
    """Exports the final policy if the run has done all its steps and `checkpoint.export_at_end` is set."""
    export_path = None
    if run.version >= run.num_steps and run.config.checkpoint.export_at_end:
        export_path = run.record.export_path
        if not run.record.set_aside_export(run.version):
            with run.phase(Phase.CHECKPOINTING):
                await trainer.export(str(export_path))
            require_visible(export_path, "the exported model")
            await run.record.ledger.free()
            run.record.record_export(run.version)
    return Outcome.of(run, run.version, run.num_steps, export_path)


async def close_run(run: Run[AnyConfig], addresses: Addresses) -> None:
    """Makes services that were given by address free the memory that they hold for `run`, which ended without an error.

    If a service fails to do so, it is only logged: it closes the run itself when the lease ends (timeouts.lease_s), or
    when the next run is opened there.
    """
    trainers = addresses.trainers.values()
    services = (
        (addresses.reward, reward_pb2, reward_pb2_grpc.RewardServiceStub, reward_pb2_grpc.RewardServiceServicer),
        (trainers, trainer_pb2, trainer_pb2_grpc.TrainerServiceStub, trainer_pb2_grpc.TrainerServiceServicer),
        (addresses.rollout, rollout_pb2, rollout_pb2_grpc.RolloutServiceStub, rollout_pb2_grpc.RolloutServiceServicer),
    )
    closing = []
    for hosts, pb, stub, servicer in services:
        transport = addresses.rollout_transport if pb is rollout_pb2 else addresses.transport
        for at in dict.fromkeys(hosts):  # models may share a trainer
            if at and at not in addresses.started:
                client = Client(at, stub, transport, is_alone=True)
                closing.append(_close(run, client, servicer.CloseRun, pb.CloseRunRequest(run_id=run.run_id)))
    await gather(closing)


async def _close(run: Run[AnyConfig], client: Client, method: Method[Any, Message], request: Message) -> None:
    try:
        await client.call(method, request, timeout_s=run.config.timeouts.info_s)
    except LockstepError as error:
        log.warning("run %s may still be open at %s: %s", run.run_id, client.address, error.message)
    finally:
        await client.close()


def outcome_if_finished(run: Run[AnyConfig], say: Callable[[str], None]) -> Outcome | None:
    """Returns the outcome of a run that has done its steps, and says so; None if a step or something else is due.

    Due is what the record does not have of the last step: its evaluation, its checkpoint or its export. A run that
    goes back to a checkpoint is not finished.

    Raises:
        InvalidInput: It is new, and begins at a checkpoint that has all its steps.
    """
    ledger, config = run.record.ledger, run.config
    version = ledger.last_finished() or 0
    stopping = config.evaluation.early_stopping
    is_early = stopping is not None and best_if_stalled(comparable_evaluations(ledger, version), stopping) is not None
    last = version if is_early else run.num_steps
    if run.required_step is not None:
        if not version:
            require_steps_after(run.required_step, run.num_steps)
        return None
    if not 0 < last <= version or _is_due(run, version, is_early=is_early):
        if 0 < run.num_steps < version:
            log.warning("num_steps %d is less than the %d steps that the run has done", run.num_steps, version)
        return None
    if is_early:
        say(f"{config.name} was ended by early stopping after step {version}; use another name")
    else:
        key = "num_epochs" if isinstance(config, SftConfig) and config.num_epochs else "num_steps"
        say(f"{config.name} already has its {counted(version, 'step')}; raise {key} or use another name")
    path = run.record.export_path if config.checkpoint.export_at_end else None
    return Outcome.of(run, version, last, path)


def _is_due(run: Run[AnyConfig], version: int, *, is_early: bool) -> bool:
    settings, record = run.config.checkpoint, run.record
    is_saved = any(row["version"] == version for row in record.ledger.checkpoints(Kind.SAVED))
    must_save = run.checkpoint_due(version) or (is_early and settings.save_freq > 0)
    must_evaluate = run.eval_due(version) and not record.was_evaluated(version)
    must_export = settings.export_at_end and not record.is_exported(version)
    return must_evaluate or must_export or (must_save and not is_saved)


@dataclass(frozen=True)
class Services:
    trainer: Trainer
    rollout: Rollout
    reward: Rewards
    environments: Environments | None
    auxiliary: Mapping[str, Model]
    gpus: OwnGpus

    @property
    def tools(self) -> Tools:
        """The tools that every prompt shows."""
        return self.environments.tools if self.environments else []


@asynccontextmanager
async def open_services(run: Run, addresses: Addresses) -> AsyncIterator[Services]:
    """Opens the trainer, then the other services; the replicas need the model card that the trainer returns.

    If the block succeeds, services that were given by address free the memory that they hold for the run. After a
    failure they keep it, so that the run can resume.

    Raises:
        InvalidInput: The run is colocated, and there are more or fewer engine workers than trainer ranks.
        LockstepError: The error of the first service that failed to open.
    """
    config, transport, gpus = run.config, addresses.transport, gpus_of(run.config)
    trainer = Trainer(addresses.trainer, config, transport, gpus)
    reward = Rewards(addresses.reward, config, transport, is_stopping=lambda: run.stopping)
    auxiliary = {name: Model(name, addresses.of(name), config, transport, gpus) for name in config.auxiliary_roles}
    rollout = Rollout(addresses.rollout, config, addresses.rollout_transport, gpus, addresses.started)
    run.reporters.tell(lambda reporter: reporter.watch(rollout))
    try:
        if config.takes_turns:
            await rollout.sleep_if_open(run.run_id)
        opened_version = await trainer.open(run.run_id, run.resume_from)
        # A trainer that outlived its coordinator may be newer than the record, and the batches in flight are lost.
        if config.trainer.lag.versions and opened_version != run.first_version:
            await trainer.go_back(run.run_id, run.resume_from)
        opens = [_open(run, trainer, model) for name, model in auxiliary.items() if name in config.models]
        if config.placement == "colocated":  # an engine counts the memory of its GPU when it starts
            await gather(opens)
            opens = []
        if config.takes_turns:  # engines need the memory that models have while they are opened
            await trainer.release_memory(trainer_pb2.MODEL_PART_PARAMETERS, trainer_pb2.MODEL_PART_OPTIMIZER)
        await gather([reward.open(run.run_id), rollout.open(run.run_id, trainer.opened.model_card), *opens])
        if not config.takes_turns:  # an earlier session may have, whose engines have ended now
            await trainer.acquire_memory(trainer_pb2.MODEL_PART_PARAMETERS, trainer_pb2.MODEL_PART_OPTIMIZER)
        if config.placement == "colocated":
            _require_pairs(trainer.opened.num_ranks, rollout)
        async with open_environments(reward, config, transport) as environments:
            yield Services(trainer, rollout, reward, environments, auxiliary, gpus)
    finally:
        await gather(
            [trainer.close(), reward.close(), rollout.close(), *(model.close() for model in auxiliary.values())]
        )
    await close_run(run, replace(addresses, rollout=tuple(replica.address for replica in rollout.replicas)))


async def _open(run: Run, trainer: Trainer, model: Model) -> None:
    """Opens another model than the policy, which `trainer` has opened.

    Raises:
        InvalidInput: It has other tokens than the policy, or is a teacher that cannot score the policy's.
    """
    await model.open(run.run_id, run.resume_critic_from if model.name == "critic" else "")
    policy, config = trainer.opened.model_card, run.config
    if model.name != "teacher":
        require_same_tokens(policy, model.opened.model_card, model.name)
    else:
        longest, top_k = config.rollout.max_model_len, config.trainer.loss.distill.used_top_k
        require_teacher(policy, model.opened.model_card, max_model_len=longest, top_k=top_k)
        model.return_top_k(top_k, vocab_size_of(policy.files["config.json"]))


def _require_pairs(num_ranks: int, rollout: Rollout) -> None:
    num_workers = [replica.num_workers for replica in rollout.replicas]
    if sum(num_workers) != num_ranks:
        there = ", ".join(f"{count} at {at.address}" for count, at in zip(num_workers, rollout.replicas, strict=True))
        raise InvalidInput(
            f"placement colocated needs one engine worker for each of the trainer's {num_ranks} ranks, but the "
            f"replicas have {sum(num_workers)} ({there}): give as many --rollout addresses as it takes",
            field="placement",
        )
