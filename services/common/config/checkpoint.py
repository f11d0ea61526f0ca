"""Refuses a checkpoint that was saved with settings that make it another model or optimizer."""

from collections.abc import Mapping

from services.common.config.trainer import TrainerConfig
from services.common.errors import PreconditionFailed


def tensor_settings(config: TrainerConfig) -> dict[str, object]:
    """Returns the values by config key without which a checkpoint has other tensors."""
    adapters = {"lora.alpha": config.lora.alpha} if config.lora.rank else {}
    return {"strategy": config.strategy, "optim.kind": config.optim.kind, "lora.rank": config.lora.rank, **adapters}


def require_made_with(saved: Mapping[str, object], now: Mapping[str, object], checkpoint_path: str) -> None:
    """Raises PreconditionFailed if a checkpoint was saved with other values; `now` need not have all of them."""
    different = [key for key in saved if saved[key] != now.get(key, saved[key])]
    if files := [key.removeprefix("model/") for key in different if key.startswith("model/")]:
        raise PreconditionFailed(
            f"checkpoint {checkpoint_path} was saved with another {' and '.join(files)} of the model: set model to the "
            "one that it was trained from (config.json in the run's directory names it), or start from an export of "
            "the checkpoint (lockstep export)",
            field="model",
        )
    if different:
        were, are = (", ".join(f"{key} {values[key]}" for key in different) for values in (saved, now))
        raise PreconditionFailed(
            f"checkpoint {checkpoint_path} was saved with {were}, and the config has {are}: it would be another "
            "model or optimizer; set them as they were, or start from an export of the checkpoint (lockstep export)",
            field=different[0],
        )
