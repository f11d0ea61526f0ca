"""Runs all checks, in the order in which they are shown: also those of replicas and of a shared GPU."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from rich.console import Console

from services.common.config.load import AnyConfig
from services.common.config.rollout import DiscoveryConfig
from services.common.config.run import Config
from services.common.errors import DataLoss, LockstepError, NotFound, Unavailable, counted
from services.common.rpc.address import parse_address
from services.coordinator.data.reading.hub import with_local_models
from services.coordinator.doctor import Finding, Verdict, show_findings
from services.coordinator.doctor.host import examine_host
from services.coordinator.doctor.inputs import examine_environment, examine_inputs
from services.coordinator.doctor.services import check_broadcast, examine_services
from services.coordinator.doctor.settings import examine_scorers, examine_settings
from services.coordinator.fleet.launch import Addresses, started_ranks
from services.coordinator.fleet.membership import read_source, source_of
from services.coordinator.rl.session import Dataset
from services.coordinator.runs.resume import check_resume

# torch reads both; the second is its name for all accelerators.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def examine_colocated(
    config: Config, addresses: Addresses, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Runs the checks of a colocated run; yields nothing for another one."""
    if config.placement != "colocated":
        return
    # Trainer and engines exchange weights through GPU memory (CUDA IPC), and may take turns on it (vLLM's sleep mode).
    try:
        addresses.require_placement(config)
        yield Finding("placement", "trainer and rollout on one host")
    except LockstepError as error:
        yield Finding("placement", "colocated", Verdict.FAIL, error.message)
    yield check_namespaces(addresses)
    if config.takes_turns:
        yield check_allocator(environment)


def check_namespaces(addresses: Addresses) -> Finding:
    """Reports the namespaces of trainer and rollout, which must be shared for CUDA IPC and abstract Unix sockets."""
    if not addresses.trainer:
        return Finding("namespaces", "those of this process: both services are started here")
    fix = "if they run in containers, give both the same network, IPC and PID namespaces, or publications fail"
    return Finding("namespaces", "cannot be seen from here: both services were started by others", Verdict.WARN, fix)


def check_allocator(environment: Mapping[str, str]) -> Finding:
    """Checks that torch's allocator does not use expandable segments, with which vLLM cannot sleep."""
    for name in _ALLOCATOR:
        value = environment.get(name, "").replace(" ", "")
        if "expandable_segments:True" in value:
            fix = f"remove expandable_segments from {name}: vLLM's sleep mode does not work with it"
            return Finding("allocator", f"{name}={value}", Verdict.FAIL, fix)
    return Finding("allocator", "no expandable segments")


def examine_replicas(config: AnyConfig, addresses: Addresses) -> Iterator[Finding]:
    """Reads the list of replicas once, if `rollout.discovery` is set, and says what `restart` means for the run."""
    if isinstance(config, Config) and config.rollout.discovery:
        yield check_discovery(config.rollout.discovery)
    if started_ranks(config, addresses):
        yield check_restarts(config)


def check_discovery(discovery: DiscoveryConfig) -> Finding:
    """Reads the list of replicas once, and checks that the file or the DNS name has one."""
    replicas, why = asyncio.run(read_source(source_of(discovery)))
    try:
        for address in replicas:
            parse_address(address, field="rollout.discovery")
    except LockstepError as error:
        return Finding("discovery", error.message, Verdict.FAIL, "write one HOST:PORT on each line")
    if not replicas:
        fix = "start a replica: the run waits for the first one up to timeouts.open_s"
        return Finding("discovery", f"no replica is listed: {why}", Verdict.WARN, fix)
    return Finding("discovery", f"{counted(len(replicas), 'replica')}: {', '.join(replicas)}")


def check_restarts(config: AnyConfig) -> Finding:
    """Reports from where the run resumes if its trainer dies."""
    if not config.restart.max:
        return Finding("restart", "no service is started again: the run ends when one dies")
    often = f"each service up to {counted(config.restart.max, 'time')} in {config.restart.window_s:g} s"
    place = "step 1 (checkpoint.save_freq is 0)"
    if save_freq := config.checkpoint.save_freq:
        place = f"a checkpoint that is at most {counted(save_freq, 'step')} old"
    return Finding("restart", f"{often}; after a death of the trainer the run resumes from {place}")


def examine_resume(config: AnyConfig) -> Iterator[Finding]:
    """Checks that what `resume` asks for is there, and that a run which is in the directory has the same config."""
    try:
        check_resume(config)
    except LockstepError as error:
        field = error.metadata.get("field") or "the config"
        fix = "set resume to what is there, or leave it out" if field == "resume" else f"correct {field}"
        if isinstance(error, DataLoss):
            fix = "restore it, or set resume to another checkpoint"
        yield Finding("resume", error.message, Verdict.FAIL, fix)
    else:
        if config.resume != "auto":
            yield Finding("resume", config.resume)


def examine(config: AnyConfig | None, addresses: Addresses, console: Console) -> bool:
    """Checks this host and the services at `addresses` and prints the findings. Returns whether no check failed."""
    with console.status("checking"):
        absent: list[Finding] = []
        if config:
            config, absent = _with_model(config, addresses)
        findings = list(examine_host(config, addresses))
        if config:
            findings += _of_run(config, addresses, absent)
        if not (addresses.trainer and addresses.rollout):
            fix = "install torch if trainer or rollout are to run on this host"
            no_torch = Finding("broadcast", "not tried: torch is not installed here", Verdict.WARN, fix)
            findings.append(asyncio.run(check_broadcast()) if find_spec("torch") else no_torch)
        findings += asyncio.run(examine_services(addresses))
    return show_findings(findings, console)


def examine_run(config: AnyConfig, addresses: Addresses, console: Console) -> bool:
    """Runs only the checks of a run's config, and prints the findings. Returns whether no check failed."""
    with console.status("checking"):
        config, absent = _with_model(config, addresses)
        findings = list(_of_run(config, addresses, absent))
    return show_findings(findings, console)


def _with_model(config: AnyConfig, addresses: Addresses) -> tuple[AnyConfig, list[Finding]]:
    """Returns the config with the directory of a model on the Hub, or what to say of a model that cannot be found.

    A model of a trainer at an address is on that trainer's host.
    """
    try:
        return config if addresses.trainer else with_local_models(config, has_weights=False), []
    except (NotFound, Unavailable) as error:
        fix = "download the model, or set the key to a directory in the Hugging Face format"
        unread = Finding("data", "not read without the model's tokenizer", Verdict.WARN, "see above")
        return config, [Finding("model", error.message, Verdict.FAIL, fix), unread]


def _of_run(config: AnyConfig, addresses: Addresses, absent: Sequence[Finding]) -> Iterator[Finding]:
    """Yields the checks of a run's config; `absent` has those of its model and data if there is no model."""
    loaded: list[Dataset] = []
    yield from absent or examine_inputs(config, addresses, loaded)
    yield from examine_settings(config, addresses)
    yield from examine_replicas(config, addresses)
    yield from examine_resume(config)
    if isinstance(config, Config):
        yield from examine_colocated(config, addresses)
        yield from examine_scorers(config, addresses, loaded[0].train.prompts if loaded else ())
        yield from examine_environment(config, addresses, loaded[0] if loaded else None)
