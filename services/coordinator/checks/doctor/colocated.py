"""Checks whether trainer and engines can share this host's GPUs."""

import os
from collections.abc import Iterator, Mapping

from services.common.config.run import Config
from services.common.errors import LockstepError
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.services.launch import Addresses

# torch reads both; the second is its name for all accelerators.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def examine_colocated(
    config: Config, given: Addresses, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Runs the checks of a colocated run; yields nothing for another one."""
    if config.placement != "colocated":
        return
    try:
        given.require_placement(config)
        yield Finding("placement", "trainer and rollout on one host")
    except LockstepError as error:
        yield Finding("placement", "colocated", Verdict.FAIL, error.message)
    yield check_namespaces(given)
    yield check_allocator(environment)


def check_namespaces(given: Addresses) -> Finding:
    """Reports the namespaces of trainer and rollout, which must be shared for CUDA IPC and abstract Unix sockets."""
    if not given.trainer:
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
