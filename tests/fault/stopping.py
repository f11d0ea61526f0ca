"""How the tests catch a replica with samples in it, or with none."""

import os
import signal
import time

from tests.e2e.lockstep_command import LockstepRun, replica_info
from tests.support import engine_of


def all_idle(addresses: list[str]) -> bool:
    """Returns whether nothing is in the engines for three seconds: a next group would be there at once."""
    for _ in range(10):
        if any(replica_info(address).samples_in_flight for address in addresses):
            return False
        time.sleep(0.3)
    return True


def stop_while_generating(run: LockstepRun, address: str, service: int, version: int) -> int:
    """Stops the engine of process `service` as soon as `version` is served; its pid, once it has samples.

    A step's samples take a second, so one that only looked for samples could come too late for the last of them.
    """
    engine = engine_of(service)
    run.until(lambda: run.has("published", version), f"version {version} to be served")
    os.kill(engine, signal.SIGSTOP)
    run.until(lambda: replica_info(address).samples_in_flight, "samples in the replica")
    return engine
