"""Opens and closes the services of a run together."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from lockstep.trainer.v1.trainer_pb2 import MODEL_PART_OPTIMIZER, MODEL_PART_PARAMETERS

from services.common.errors import InvalidInput
from services.common.tasks import gather
from services.coordinator.runs.reporter import Tolerant
from services.coordinator.runs.run import Run
from services.coordinator.services.clients.environment import Environments, open_environments
from services.coordinator.services.clients.rewards import Rewards
from services.coordinator.services.clients.rollout import Rollout
from services.coordinator.services.clients.trainer import Model, Trainer
from services.coordinator.services.closing import close_run
from services.coordinator.services.gpus import OwnGpus, gpus_of
from services.coordinator.services.launch import Addresses


@dataclass(frozen=True)
class Services:
    """Holds the open services of a run."""

    trainer: Trainer
    rollout: Rollout
    reward: Rewards
    environments: Environments | None
    """The environments of the reward services, if the run has one."""
    auxiliary: Mapping[str, Model]
    """The reference and the critic by name, if the run has them."""
    gpus: OwnGpus
    """Lets trainer and engines hold the GPUs."""


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
    trainer, reward = Trainer(addresses.trainer, config, transport, gpus), Rewards(addresses.reward, config, transport)
    auxiliary = {name: Model(name, addresses.of(name), config, transport, gpus) for name in config.auxiliary_roles}
    rollout = Rollout(addresses.rollout, config, addresses.rollout_transport, gpus, addresses.started)
    for watcher in run.watchers:
        Tolerant(watcher).watch(rollout)
    try:
        held = await trainer.open(run.run_id, run.resume_from)
        if config.trainer.lag.versions and held != run.first_version:
            await trainer.go_back(run.run_id, run.resume_from)
        opens = [
            model.open(run.run_id, run.resume_critic_from if name == "critic" else "")
            for name, model in auxiliary.items()
            if name in config.models
        ]
        if config.placement == "colocated":  # engines need the memory that models have while they are opened
            await gather(opens)
            await trainer.release_memory(MODEL_PART_PARAMETERS, MODEL_PART_OPTIMIZER)
            opens = []
        await gather([reward.open(run.run_id), rollout.open(run.run_id, trainer.opened.model_card), *opens])
        if config.placement == "colocated":
            _require_pairs(trainer.opened.num_ranks, rollout)
        async with open_environments(reward, config, transport) as environments:
            yield Services(trainer, rollout, reward, environments, auxiliary, gpus)
    finally:
        await gather(
            [trainer.close(), reward.close(), rollout.close(), *(model.close() for model in auxiliary.values())]
        )
    await close_run(run, replace(addresses, rollout=tuple(replica.address for replica in rollout.replicas)))


def _require_pairs(num_ranks: int, rollout: Rollout) -> None:
    num_workers = [replica.num_workers for replica in rollout.replicas]
    if sum(num_workers) != num_ranks:
        found = ", ".join(f"{count} at {at.address}" for count, at in zip(num_workers, rollout.replicas, strict=True))
        raise InvalidInput(
            f"placement colocated needs one engine worker for each of the trainer's {num_ranks} ranks, but the "
            f"replicas have {sum(num_workers)} ({found}): give as many --rollout addresses as it takes",
            field="placement",
        )
