"""Services that end-to-end tests share: to start a replica or a trainer takes longer than most runs on them."""

from collections.abc import Iterator, Sequence

import pytest

from tests.e2e.lockstep_command import running_services
from tests.support import free_port


@pytest.fixture(scope="session")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[str]]:
    """Returns the options that name a running trainer of two ranks and two replicas, in this order.

    They run in a directory of their own, so that the path of a model must be absolute.
    """
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("trainer", "rollout-0", "rollout-1")}
    with running_services(addresses, tmp_path_factory.mktemp("lent")) as processes:
        yield [f"--{name.partition('-')[0]}={address}" for name, address in addresses.items()]
        assert all(process.poll() is None for process in processes), "a service that was only borrowed has ended"
