"""Lists the kinds of environments."""

from collections.abc import Callable, Mapping

from services.common.config.environment import EnvironmentConfig
from services.reward.environments.base import Environment
from services.reward.environments.openenv import OpenEnvironment
from services.reward.environments.python import python, reasoning_gym, textarena
from services.reward.environments.tools import ToolsEnvironment

KINDS: Mapping[str, Callable[..., Environment]] = {
    "python": python,
    "tools": ToolsEnvironment,
    "textarena": textarena,
    "reasoning_gym": reasoning_gym,
    "openenv": OpenEnvironment,
}
"""Maps each kind to the function that makes its environment from its config."""


def make_environment(config: EnvironmentConfig) -> Environment:
    """Returns the environment of a config, not yet open."""
    return KINDS[config.kind](config)
