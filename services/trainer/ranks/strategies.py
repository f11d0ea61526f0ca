"""Builds the backend that a config names."""

import torch

from services.common.config.trainer import TrainerConfig
from services.trainer.backend import Backend, Role


def make_backend(role: Role, config: TrainerConfig, model_path: str, device: torch.device) -> Backend:
    """Imports and builds the backend. A host may have only one backend's libraries, and they are slow to import."""
    if config.strategy == "megatron":
        from services.trainer.megatron.backend import MegatronBackend

        return MegatronBackend(role, config, model_path, device)
    from services.trainer.fsdp.backend import FsdpBackend

    return FsdpBackend(role, config, model_path, device)
