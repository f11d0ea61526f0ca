"""Opens a trainer and replicas to publish weights, without a run."""

from types import SimpleNamespace
from typing import Any

from services.common.config.run import Config
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Trainer
from services.coordinator.rl.publishing import Publisher


async def open_publisher(trainer: Trainer, rollout: Rollout, config: Config, run_id: str) -> tuple[Publisher, int]:
    """Opens trainer and replicas; returns their publisher and the version that the trainer holds.

    Raises:
        LockstepError: The error of the first service that cannot be opened.
    """
    version = await trainer.open(run_id, "")
    await rollout.open(run_id, trainer.opened.model_card)
    run: Any = SimpleNamespace(
        config=config,
        run_id=run_id,
        record=SimpleNamespace(
            ledger=SimpleNamespace(free=_nothing),
            next_epoch=lambda num: 1,
            record_published=lambda stamp, received, quantized: None,
        ),
    )
    return Publisher(trainer, rollout, run), version


async def _nothing() -> None: ...
