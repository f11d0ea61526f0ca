"""Checks that this host can play the run's environment, by playing short episodes as the reward service does."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.common.config.environment import EnvironmentConfig
from services.common.config.run import Config
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.checks.doctor.inputs import shown
from services.coordinator.checks.doctor.settings import fix_of
from services.coordinator.data.order import environment_seed
from services.coordinator.data.prompts import Prompt
from services.coordinator.services.clients.environment import row_of
from services.coordinator.services.launch import Addresses
from services.coordinator.services.tools import PROBE, TIMEOUT_S, probe_environment

_FIXES = {
    "python": "run in the directory from which the module can be imported, or install it where the reward service runs",
    "tools": "check environment.tools, and that their files and packages are where the reward service runs",
    "textarena": "pip install 'lockstep-rl[environments]' where the reward service runs; check environment.game",
    "reasoning_gym": "pip install 'lockstep-rl[environments]' where the reward service runs; check environment.task",
    "openenv": "start the OpenEnv server, and check environment.url and any firewall in between",
}


def examine_environment(config: Config, given: Addresses, prompt: Prompt | None = None) -> Iterator[Finding]:
    """Opens the environment of a run that starts its reward service here, and plays short episodes of `prompt`."""
    if config.environment is None:
        return
    if given.reward:
        yield Finding("environment", "not opened: it runs where the reward services do")
        return
    calls = []
    if prompt:
        begin = {"reset": row_of(prompt), "seed": environment_seed(config.seed, prompt.prompt_id)}
        # A turn that the environment may expect, and the shortest that a policy can write.
        calls = [begin, {"step": prompt.answer or ""}, begin, {"step": ""}]
    yield check_environment(config.environment, calls=calls)


def check_environment(
    environment: EnvironmentConfig,
    command: Sequence[str] = PROBE,
    timeout_s: float = TIMEOUT_S,
    calls: Sequence[Mapping[str, object]] = (),
) -> Finding:
    """Checks that the environment opens and answers `calls`; shows its name, version and tools."""
    try:
        done = probe_environment(environment, command, timeout_s, calls)
    except subprocess.TimeoutExpired:
        why = f"{environment.kind}: it did not open within {timeout_s:g} s"
        return Finding(
            "environment", why, Verdict.WARN, "a large corpus takes long; otherwise see the module's imports"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["the probe failed without a message"]
        return _failed(environment, lines[-1])
    opened, *answers = map(json.loads, done.stdout.splitlines())
    names = [schema["function"]["name"] for schema in opened["tools"]]
    tools = f", tools {', '.join(names)}" if names else ""
    found = f"{environment.kind} {opened['version']} opens{tools}"
    return _judge(environment, calls, answers) or Finding("environment", f"{found}{', and plays' * bool(calls)}")


def _judge(
    environment: EnvironmentConfig, calls: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> Finding | None:
    """Returns what is wrong with the answers. A step may be at fault alone, if it fails only with some texts."""
    whys = [answer.get("failure", {}).get("message") for answer in answers]
    resets, steps = ([pair for pair in zip(calls, whys, strict=True) if name in pair[0]] for name in ("reset", "step"))
    for name, played in (("reset", resets[:1]), ("step", steps)):
        if played and all(why for _, why in played):
            return _failed(environment, f"{name}: {played[0][1]}")
    failed = [(call, why) for call, why in steps if why]
    if not failed:
        return None
    call, why = failed[0]
    fix = "answer any text in step: the policy may write it, and a failure is no reward and drops the prompt group"
    return Finding("environment", f"step({shown(call['step'])}): {why}", Verdict.WARN, fix)


def _failed(environment: EnvironmentConfig, why: str) -> Finding:
    fix = _FIXES[environment.kind]
    if environment.kind == "python":
        fix = fix_of(why, fix, "environment.path and environment.kwargs")
    return Finding("environment", f"{environment.kind}: {why}", Verdict.FAIL, fix)
