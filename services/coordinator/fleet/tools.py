"""Asks a run's environment for its tools before any service starts, because every prompt is sent with their schemas."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence

from services.common.config.environment import EnvironmentConfig
from services.common.config.run import Config
from services.coordinator.fleet.launch import Addresses

Tools = Sequence[Mapping[str, object]]
"""JSON schemas, as chat templates take them."""

PROBE = ("-m", "services.reward.environments.probe")
TIMEOUT_S = 300.0
"""Time limit for opening an environment, which may import torch or index a corpus."""

_log = logging.getLogger(__name__)


def probe_environment(
    environment: EnvironmentConfig,
    command: Sequence[str] = PROBE,
    timeout_s: float = TIMEOUT_S,
    calls: Sequence[Mapping[str, object]] = (),
) -> subprocess.CompletedProcess[str]:
    """Opens the environment in a process of its own, makes `calls`, and closes it: services.reward.environments.probe.

    Raises:
        TimeoutExpired: It did not open in `timeout_s`, or a call took longer than the config allows.
    """
    lines = [json.dumps(line) for line in ({"environment": environment.model_dump(mode="json")}, *calls)]
    return subprocess.run(
        [sys.executable, *command],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=timeout_s + len(calls) * environment.turn_s,
        check=False,
    )


def known_tools(config: Config, given: Addresses) -> Tools | None:
    """Returns the tools that prompts will show.

    None if this host cannot tell, because another host has the environment or it does not open. A run that starts asks
    its reward service again, and its prompts are then read with the tools that it really has.
    """
    environment = config.environment
    if environment is None or environment.kind != "tools" or environment.syntax == "tags":
        return []
    if given.reward:
        return None
    try:
        done = probe_environment(environment)
    except subprocess.TimeoutExpired:
        _log.warning("environment: it did not open within %g s; prompts are measured without its tools", TIMEOUT_S)
        return None
    return None if done.returncode else json.loads(done.stdout.splitlines()[0])["tools"]
