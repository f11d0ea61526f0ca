"""The services of a run, opened and closed together."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.common.tasks import gather
from services.coordinator.runs.run import Run
from services.coordinator.services.clients.reward import Reward
from services.coordinator.services.clients.rollout import Rollout
from services.coordinator.services.clients.trainer import Model, Trainer
from services.coordinator.services.closing import close_run
from services.coordinator.services.launch import Addresses


@dataclass(frozen=True)
class Services:
    """All that samples are made with and trained on."""

    trainer: Trainer
    rollout: Rollout
    reward: Reward
    auxiliary: Mapping[str, Model]
    """The reference and the critic, as far as the run has them, by name."""


@asynccontextmanager
async def open_services(run: Run, addresses: Addresses) -> AsyncIterator[Services]:
    """Opens the trainer, then the others: the replicas with the model card that it answers.

    At the end of a block that did not fail, those that were given by address free what they hold of the run; after a
    failure they keep it, for the run to go on with.

    Raises:
        LockstepError: As the first that does not open.
    """
    config, transport = run.config, addresses.transport
    trainer, reward = Trainer(addresses.trainer, config, transport), Reward(addresses.reward, config, transport)
    auxiliary = {name: Model(name, addresses.of(name), config, transport) for name in config.auxiliary_roles}
    rollout = Rollout(addresses.rollout, config, transport)
    for watcher in run.watchers:
        watcher.watch(rollout)
    try:
        await trainer.open(run.run_id, run.resume_from)
        opens = [
            model.open(run.run_id, run.resume_critic_from if name == "critic" else "")
            for name, model in auxiliary.items()
            if name in config.models
        ]
        await gather([reward.open(run.run_id), rollout.open(run.run_id, trainer.opened.model_card), *opens])
        yield Services(trainer, rollout, reward, auxiliary)
    finally:
        await gather(
            [trainer.close(), reward.close(), rollout.close(), *(model.close() for model in auxiliary.values())]
        )
    await close_run(run, addresses)
