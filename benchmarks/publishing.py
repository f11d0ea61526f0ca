"""A trainer and replicas ready to publish, without a run around them."""

from types import SimpleNamespace
from typing import Any

from services.common.config.run import Config
from services.coordinator.rl.publication import Publisher
from services.coordinator.services.clients.rollout import Rollout
from services.coordinator.services.clients.trainer import Trainer


async def open_publisher(trainer: Trainer, rollout: Rollout, config: Config, run_id: str) -> tuple[Publisher, int]:
    """Opens both; the publisher between them, and the version that the trainer holds.

    Raises:
        LockstepError: As the first that does not open.
    """
    version = await trainer.open(run_id, "")
    await rollout.open(run_id, trainer.opened.model_card)
    run: Any = SimpleNamespace(
        config=config,
        run_id=run_id,
        record=SimpleNamespace(next_epoch=lambda num: 1, record_published=lambda stamp: None),
    )
    return Publisher(trainer, rollout, run), version
