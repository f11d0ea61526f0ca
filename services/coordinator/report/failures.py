"""What went wrong in a run, counted by its reason: from the logs of its processes and the numbers of its steps."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.coordinator.report.curves import Row

_TIME = r"^(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* \w (?:\w+ )?"
# As services.common.rpc, coordinator.clients.reward and coordinator.clients.rollout write them.
_CALL = re.compile(_TIME + r"services\.common\.rpc: /lockstep\.\S+/(?P<where>\w+): (?P<reason>[A-Z_]+) (?P<text>.*)")
_SCORER = re.compile(_TIME + r"\S+: prompt \S+: scorer (?P<where>.+?): (?P<reason>[A-Z_]+): (?P<text>.*)")
_REPLICA = re.compile(_TIME + r"\S+: replica (?P<where>\S+) is out: (?P<text>.*)")
_DROPPED = "sampling/dropped_"
_MAX_TEXT = 400


@dataclass
class Failure:
    """How often something failed for one reason, and what was said of it the last time."""

    what: str
    reason: str
    count: int
    last: str
    text: str


def failures(run_dir: Path, steps: Sequence[Row]) -> list[Failure]:
    """Refused calls, samples without a score, lost replicas and dropped groups, the most frequent first."""
    found: dict[tuple[str, str], Failure] = {}
    for failure in (*_logged(run_dir), *_dropped(steps)):
        before = found.setdefault((failure.what, failure.reason), failure)
        if before is not failure:
            before.count += failure.count
            before.last, before.text = failure.last, failure.text
    return sorted(found.values(), key=lambda failure: -failure.count)


def _logged(run_dir: Path) -> Iterator[Failure]:
    for path in sorted((run_dir / "logs").glob("*.log")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                yield from _in_line(path.stem, line)


def _in_line(process: str, line: str) -> Iterator[Failure]:
    text = line.rstrip("\n")
    if found := _CALL.match(text):
        what, reason = f"{found['where']} of {process}", found["reason"]
    elif found := _SCORER.match(text):
        what, reason = f"scorer {found['where']}", found["reason"]
    elif found := _REPLICA.match(text):
        what, reason = f"replica {found['where']}", "LOST"
    else:
        return
    yield Failure(what, reason, 1, found["time"], found["text"][:_MAX_TEXT])


def _dropped(steps: Sequence[Row]) -> Iterator[Failure]:
    for row in steps:
        for name in (name for name in row if name.startswith(_DROPPED) and row[name]):
            reason = name.removeprefix(_DROPPED).upper()
            yield Failure("prompt groups dropped", reason, int(row[name]), f"step {row['step']}", "")
