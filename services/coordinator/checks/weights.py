"""Checks the weight files of a run's models before any service starts."""

from pathlib import Path

from services.common.config.reading.load import AnyConfig, role_section
from services.common.files.weight_files import require_whole_weights
from services.coordinator.services.launch import Addresses


def check_weights(config: AnyConfig, given: Addresses, *, may_download: bool = False) -> None:
    """Checks that the models that a trainer of this host will load have all their weights.

    Args:
        config: The run's config. A model that is no directory here is not checked.
        given: Addresses of running services; models of a trainer with an address are on its host.
        may_download: Accepts a model in the Hub's cache without weights, which the run will download.

    Raises:
        InvalidInput: A file is missing or damaged.
    """
    for name, settings in config.models.items():
        role = role_section(config, name)
        directory = Path((role.model if role else None) or config.model)
        is_converted = settings.strategy == "megatron" and bool(settings.megatron.dist_checkpointing_path)
        is_left = may_download and _is_in_cache(directory) and not any(directory.glob("*.safetensors"))
        if directory.is_dir() and not (given.of(name) or is_converted or is_left):
            require_whole_weights(directory)


def _is_in_cache(directory: Path) -> bool:
    """Returns whether a directory is a snapshot in the Hub's cache, `models--OWNER--NAME/snapshots/REVISION`."""
    return directory.parent.name == "snapshots"
