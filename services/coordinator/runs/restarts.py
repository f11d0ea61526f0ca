"""Counts the restarts of the services that a run has started, and keeps the state that a repeated session needs."""

import time
from collections import defaultdict, deque
from collections.abc import Callable

from services.common.config.load import AnyConfig
from services.common.config.placement import RestartConfig
from services.coordinator.runs.run import Run


class Restarts:
    """Says whether a service that died may be started again."""

    def __init__(self, config: RestartConfig, clock: Callable[[], float] = time.monotonic):
        """Counts nothing yet; `clock` returns seconds."""
        self._config, self._clock = config, clock
        self.run: Run[AnyConfig] | None = None
        """The session in progress, or the last one."""
        self.added: list[str] = []
        """Replicas that joined a session after its start; the next session has them too."""
        self.removed: list[str] = []
        """Replicas that left a session; the next session does not have them."""
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)

    @property
    def may_resume(self) -> bool:
        """Returns whether to repeat a session: its services could be opened, and nobody has asked it to stop."""
        return self.run is not None and self.run.has_begun and not self.run.stopping

    def take(self, service: str) -> bool:
        """Returns whether `service` may be started again, and counts it if so."""
        now, times = self._clock(), self._times[service]
        while times and times[0] <= now - self._config.window_s:
            times.popleft()
        if len(times) >= self._config.max:
            return False
        times.append(now)
        return True
