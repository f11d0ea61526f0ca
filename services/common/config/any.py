"""The config of a run of either kind, reinforcement learning or supervised."""

from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.config.trainer.roles import RoleConfig

AnyConfig = Config | SftConfig


def role_section(config: AnyConfig, name: str) -> RoleConfig | None:
    """Returns the section of the reference or the critic; None for `trainer`, and where there is no such model."""
    sections = {"reference": config.reference, "critic": config.critic} if isinstance(config, Config) else {}
    return sections.get(name)
