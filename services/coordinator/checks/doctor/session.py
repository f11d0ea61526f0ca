"""Runs all checks, in the order in which they are shown."""

import asyncio
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from rich.console import Console

from services.common.config.reading.any import AnyConfig
from services.common.config.run import Config
from services.coordinator.checks.doctor.colocated import examine_colocated
from services.coordinator.checks.doctor.environment import examine_environment
from services.coordinator.checks.doctor.finding import Finding, Verdict, show_findings
from services.coordinator.checks.doctor.host import examine_host
from services.coordinator.checks.doctor.inputs import examine_inputs
from services.coordinator.checks.doctor.replicas import examine_replicas
from services.coordinator.checks.doctor.running import examine_services
from services.coordinator.checks.doctor.settings import examine_settings
from services.coordinator.services.launch import Addresses


def examine(config: AnyConfig | None, given: Addresses, console: Console) -> bool:
    """Checks this host and the services at `given` and prints the findings. Returns whether no check failed."""
    with console.status("checking"):
        findings = list(examine_host(config, given))
        if config:
            findings += _of_run(config, given)
        if not (given.trainer and given.rollout):
            findings.append(_broadcast())
        findings += asyncio.run(examine_services(given))
    return _show(findings, console)


def examine_run(config: AnyConfig, given: Addresses, console: Console) -> bool:
    """Runs only the checks of a run's config, and prints the findings. Returns whether no check failed."""
    with console.status("checking"):
        findings = list(_of_run(config, given))
    return _show(findings, console)


def _of_run(config: AnyConfig, given: Addresses) -> Iterator[Finding]:
    yield from examine_inputs(config, given)
    yield from examine_settings(config, given)
    yield from examine_replicas(config, given)
    if isinstance(config, Config):
        yield from examine_colocated(config, given)
        yield from examine_environment(config, given)


def _show(findings: Sequence[Finding], console: Console) -> bool:
    show_findings(findings, console)
    return all(finding.verdict is not Verdict.FAIL for finding in findings)


def _broadcast() -> Finding:
    if find_spec("torch") is None:
        fix = "install torch if trainer or rollout are to run on this host"
        return Finding("broadcast", "not tried: torch is not installed here", Verdict.WARN, fix)
    from services.coordinator.checks.doctor.broadcast import check_broadcast

    return asyncio.run(check_broadcast())
