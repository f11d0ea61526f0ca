"""Runs all checks, in the order in which they are shown."""

import asyncio
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from rich.console import Console

from services.common.config.reading.any import AnyConfig
from services.common.config.run import Config
from services.common.errors import NotFound, Unavailable
from services.coordinator.checks.doctor.colocated import examine_colocated
from services.coordinator.checks.doctor.environment import examine_environment
from services.coordinator.checks.doctor.finding import Finding, Verdict, show_findings
from services.coordinator.checks.doctor.host import examine_host
from services.coordinator.checks.doctor.inputs import examine_inputs
from services.coordinator.checks.doctor.replicas import examine_replicas
from services.coordinator.checks.doctor.running import examine_services
from services.coordinator.checks.doctor.settings import examine_settings
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.reading.hub import with_local_models
from services.coordinator.services.launch import Addresses


def examine(config: AnyConfig | None, given: Addresses, console: Console) -> bool:
    """Checks this host and the services at `given` and prints the findings. Returns whether no check failed."""
    with console.status("checking"):
        absent: list[Finding] = []
        if config:
            config, absent = _with_model(config, given)
        findings = list(examine_host(config, given))
        if config:
            findings += _of_run(config, given, absent)
        if not (given.trainer and given.rollout):
            findings.append(_broadcast())
        findings += asyncio.run(examine_services(given))
    return _show(findings, console)


def examine_run(config: AnyConfig, given: Addresses, console: Console) -> bool:
    """Runs only the checks of a run's config, and prints the findings. Returns whether no check failed."""
    with console.status("checking"):
        config, absent = _with_model(config, given)
        findings = list(_of_run(config, given, absent))
    return _show(findings, console)


def _with_model(config: AnyConfig, given: Addresses) -> tuple[AnyConfig, list[Finding]]:
    """Returns the config with the directory of a model on the Hub, or what to say of a model that cannot be found.

    A model of a trainer at an address is on that trainer's host.
    """
    try:
        return config if given.trainer else with_local_models(config, has_weights=False), []
    except (NotFound, Unavailable) as error:
        fix = "download the model, or set the key to a directory in the Hugging Face format"
        unread = Finding("data", "not read without the model's tokenizer", Verdict.WARN, "see above")
        return config, [Finding("model", error.message, Verdict.FAIL, fix), unread]


def _of_run(config: AnyConfig, given: Addresses, absent: Sequence[Finding]) -> Iterator[Finding]:
    """Yields the checks of a run's config; `absent` has those of its model and data if there is no model."""
    prompts: list[Prompt] = []
    yield from absent or examine_inputs(config, given, prompts)
    yield from examine_settings(config, given)
    yield from examine_replicas(config, given)
    if isinstance(config, Config):
        yield from examine_colocated(config, given)
        yield from examine_environment(config, given, prompts[0] if prompts else None)


def _show(findings: Sequence[Finding], console: Console) -> bool:
    show_findings(findings, console)
    return all(finding.verdict is not Verdict.FAIL for finding in findings)


def _broadcast() -> Finding:
    if find_spec("torch") is None:
        fix = "install torch if trainer or rollout are to run on this host"
        return Finding("broadcast", "not tried: torch is not installed here", Verdict.WARN, fix)
    from services.coordinator.checks.doctor.broadcast import check_broadcast

    return asyncio.run(check_broadcast())
