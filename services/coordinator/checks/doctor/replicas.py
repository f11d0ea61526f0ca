"""Checks how a run finds its replicas, and reports how it reacts if a service that it started dies."""

import asyncio
from collections.abc import Iterator

from services.common.config.reading.any import AnyConfig
from services.common.config.run import Config
from services.common.counted import counted
from services.common.errors import LockstepError
from services.common.rpc.address import parse_address
from services.coordinator.checks.doctor.finding import Finding, Verdict
from services.coordinator.services.launch import Addresses, started_ranks
from services.coordinator.services.membership import read_source, source_of


def examine_replicas(config: AnyConfig, given: Addresses) -> Iterator[Finding]:
    """Reads the list of replicas once, if `rollout.discovery` is set, and says what `restart` means for the run."""
    if isinstance(config, Config) and config.rollout.discovery:
        yield check_discovery(config)
    if started_ranks(config, given):
        yield check_restarts(config)


def check_discovery(config: Config) -> Finding:
    """Checks that the file or the DNS name lists a replica."""
    assert config.rollout.discovery, "the caller has checked"
    found, why = asyncio.run(read_source(source_of(config.rollout.discovery)))
    try:
        for address in found:
            parse_address(address, field="rollout.discovery")
    except LockstepError as error:
        return Finding("discovery", error.message, Verdict.FAIL, "write one HOST:PORT on each line")
    if not found:
        fix = "start a replica: the run waits for the first one up to timeouts.open_s"
        return Finding("discovery", f"no replica is listed: {why}", Verdict.WARN, fix)
    return Finding("discovery", f"{counted(len(found), 'replica')}: {', '.join(found)}")


def check_restarts(config: AnyConfig) -> Finding:
    """Reports from where the run resumes if its trainer dies."""
    if not config.restart.max:
        return Finding("restart", "no service is started again: the run ends when one dies")
    often = f"each service up to {counted(config.restart.max, 'time')} in {config.restart.window_s:g} s"
    save_freq = config.checkpoint.save_freq
    place = (
        f"a checkpoint that is at most {counted(save_freq, 'step')} old"
        if save_freq
        else "step 1 (checkpoint.save_freq is 0)"
    )
    return Finding("restart", f"{often}; after a death of the trainer the run resumes from {place}")
