"""Calls all reward services of a run."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.common.config.run import Config
from services.common.errors import PreconditionFailed, Reason
from services.common.rpc.security.tls import LOCAL, Transport
from services.common.tasks import gather
from services.coordinator.runs.lanes import Busy
from services.coordinator.services.clients.failure_log import FailureLog
from services.coordinator.services.clients.reward import Reward


class Rewards:
    """Sends each group to the reward service with the fewest groups in progress."""

    def __init__(self, addresses: Sequence[str], config: Config, transport: Transport = LOCAL):
        self.failure_log = FailureLog(config)
        self.services = [Reward(address, config, transport, self.failure_log) for address in addresses]
        self.busy = Busy()
        self._in_progress = dict.fromkeys(self.services, 0)

    async def open(self, run_id: str) -> None:
        """Starts the scorers and the environment on every service.

        Raises:
            PreconditionFailed: SCORER_CHANGED, the services have different versions.
        """
        await gather(service.open(run_id) for service in self.services)
        first = self.services[0]
        for service in self.services[1:]:
            for mine, others in zip(_versions(first), _versions(service), strict=True):
                if mine != others:
                    message = f"{first.address} has {mine}, but {service.address} has {others}: install one version"
                    raise PreconditionFailed(message, reason=Reason.SCORER_CHANGED)

    @contextmanager
    def least_loaded(self) -> Iterator[Reward]:
        """Yields the service for one group."""
        service = min(self.services, key=lambda service: self._in_progress[service])
        self._in_progress[service] += 1
        try:
            with self.busy.working():
                yield service
        finally:
            self._in_progress[service] -= 1

    def take_failures(self) -> dict[str, float]:
        """Returns the number of training groups with a failure since the last call, by scorer and reason."""
        total = sum((service.failures for service in self.services), Counter[str]())
        for service in self.services:
            service.failures.clear()
        return {name: float(number) for name, number in total.items()}

    async def close(self) -> None:
        """Closes the channels."""
        await gather(service.close() for service in self.services)


def _versions(service: Reward) -> tuple[str, str]:
    return service.opened.scorer, service.opened.environment
