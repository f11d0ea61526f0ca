"""Checks that this host can play the run's environment, by opening it as the reward service does."""

import json
import subprocess
from collections.abc import Iterator, Sequence

from services.common.config.environment import EnvironmentConfig
from services.common.config.run import Config
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.checks.doctor.settings import fix_of
from services.coordinator.services.launch import Addresses
from services.coordinator.services.tools import PROBE, TIMEOUT_S, probe_environment

_FIXES = {
    "python": "run in the directory from which the module can be imported, or install it where the reward service runs",
    "tools": "check environment.tools, and that their files and packages are where the reward service runs",
    "textarena": "pip install 'lockstep-rl[environments]' where the reward service runs; check environment.game",
    "reasoning_gym": "pip install 'lockstep-rl[environments]' where the reward service runs; check environment.task",
    "openenv": "start the OpenEnv server, and check environment.url and any firewall in between",
}


def examine_environment(config: Config, given: Addresses) -> Iterator[Finding]:
    """Opens and closes the environment of a run that starts its reward service on this host."""
    if config.environment is None:
        return
    if given.reward:
        yield Finding("environment", "not opened: it runs where the reward services do")
        return
    yield check_environment(config.environment)


def check_environment(
    environment: EnvironmentConfig, command: Sequence[str] = PROBE, timeout_s: float = TIMEOUT_S
) -> Finding:
    """Checks that the environment opens; shows its name, version and tools."""
    try:
        done = probe_environment(environment, command, timeout_s)
    except subprocess.TimeoutExpired:
        why = f"{environment.kind}: it did not open within {timeout_s:g} s"
        return Finding(
            "environment", why, Verdict.WARN, "a large corpus takes long; otherwise see the module's imports"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["the probe failed without a message"]
        fix = _FIXES[environment.kind]
        if environment.kind == "python":
            fix = fix_of(lines[-1], fix, "environment.path and environment.kwargs")
        return Finding("environment", f"{environment.kind}: {lines[-1]}", Verdict.FAIL, fix)
    opened = json.loads(done.stdout)
    tools = f", tools {', '.join(opened['tools'])}" if opened["tools"] else ""
    return Finding("environment", f"{environment.kind} {opened['version']} opens{tools}")
