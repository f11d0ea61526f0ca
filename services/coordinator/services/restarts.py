"""Counts the restarts of the services that a run has started."""

import time
from collections import defaultdict, deque
from collections.abc import Callable

from services.common.config.any import AnyConfig
from services.common.config.restart import RestartConfig
from services.coordinator.runs.run import Run


class Restarts:
    """Says whether a service that died may be started again."""

    def __init__(self, config: RestartConfig, clock: Callable[[], float] = time.monotonic):
        """Counts nothing yet; `clock` returns seconds."""
        self._config, self._clock = config, clock
        self.run: Run[AnyConfig] | None = None
        """The session in progress, or the last one."""
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)

    def take(self, service: str) -> bool:
        """Returns whether `service` may be started again, and counts it if so."""
        now, times = self._clock(), self._times[service]
        while times and times[0] <= now - self._config.window_s:
            times.popleft()
        if len(times) >= self._config.max:
            return False
        times.append(now)
        return True
