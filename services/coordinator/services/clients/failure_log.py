"""Logs samples without a reward: the first of each cause at once, then one count for each step or evaluation."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.config.run import Config

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Cause:
    """Says why a prompt group or an episode has no reward."""

    source: str
    """`scorer` with its name, or `environment`."""
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}: {self.message}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """Returns what is counted together: an exception's text may differ for each sample, but not its class."""
        return self.source, self.reason, self.message.partition(":")[0]


class FailureLog:
    """Counts failures by cause during one step or evaluation at a time."""

    def __init__(self, config: Config):
        self._effects = {"scorer": f"reward.on_failure: {config.reward.on_failure}"}
        if config.environment:
            self._effects[ENVIRONMENT] = (
                f"environment.max_retries: {config.environment.max_retries}, "
                f"environment.on_failure: {config.environment.on_failure}"
            )
        self._known: set[tuple[str, str, str]] = set()
        self._counts = Counter[tuple[str, str, str]]()
        self._last: dict[tuple[str, str, str], Cause] = {}
        self.last: Cause | None = None
        """The last failure of the step or evaluation."""

    def add(self, cause: Cause, where: str) -> None:
        """Takes note of a failure. The log file has each of them, the terminal the first of its kind."""
        is_new = cause.kind not in self._known
        self._known.add(cause.kind)
        log.log(logging.WARNING if is_new else logging.INFO, "%s: %s", where, cause)
        self._counts[cause.kind] += 1
        self._last[cause.kind] = self.last = cause

    @contextmanager
    def counting(self, what: str, *, is_evaluation: bool) -> Iterator[None]:
        """Counts the failures of the `with` block, which `what` names, and logs one line for each of their kinds."""
        self._counts.clear()
        self.last = None
        try:
            yield
        finally:
            for kind, number in self._counts.items():
                cause = self._last[kind]
                is_episode = cause.source == ENVIRONMENT
                effect = self._effects[ENVIRONMENT if is_episode else "scorer"]
                if is_evaluation:
                    effect = "a sample without a reward counts as 0"
                failed = "failed episodes" if is_episode else "prompts with failed samples"
                log.warning("%s: %d %s (%s): %s", what, number, failed, effect, cause)
