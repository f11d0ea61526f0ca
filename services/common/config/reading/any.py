"""Loads the config of either kind of run: reinforcement learning or supervised."""

from collections.abc import Sequence

from services.common.config.reading.load import read, validate
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.config.trainer.roles import RoleConfig

AnyConfig = Config | SftConfig


def role_section(config: AnyConfig, name: str) -> RoleConfig | None:
    """Returns the section of the reference or the critic; None for `trainer`, and where there is no such model."""
    sections = {"reference": config.reference, "critic": config.critic} if isinstance(config, Config) else {}
    return sections.get(name)


def load_any(args: Sequence[str]) -> AnyConfig:
    """Loads the config of either kind. A supervised run's has data.samples_per_step and no section `reward`.

    Raises:
        InvalidInput: See `services.common.config.reading.load.load`.
    """
    # Tables that both kinds of runs have are of the same classes.
    tree, origin = read(Config, args)
    data = tree.get("data")
    is_supervised = "reward" not in tree and isinstance(data, dict) and "samples_per_step" in data
    return validate(SftConfig if is_supervised else Config, tree, origin)
