"""Makes the tests independent of how busy the machine is and of how they are started, and shares services.

To start a replica or a trainer takes longer than most runs on them.
"""

import gc
import signal
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings

# A shell starts background jobs with SIGINT ignored, and their children inherit that; tests send SIGINT to commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time that an example takes depends on how busy the machine is.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


gc.disable()  # while modules are imported, which makes no garbage


def pytest_collection_finish() -> None:
    """What was imported is never collected again: it takes half a second, and each role that a rank closes collects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[str]]:
    """Returns the options of `lockstep run` that name a running trainer of two ranks and two replicas, in this order.

    They run in a directory of their own, so that the path of a model must be absolute.
    """
    from tests.e2e.lockstep_command import running_services
    from tests.support import free_port

    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("trainer", "rollout-0", "rollout-1")}
    with running_services(addresses, tmp_path_factory.mktemp("lent")) as processes:
        yield [f"--{name.partition('-')[0]}={address}" for name, address in addresses.items()]
        assert all(process.poll() is None for process in processes), "a service that was only borrowed has ended"
