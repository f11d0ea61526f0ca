"""Counts a run's failures by reason, from its processes' logs and its steps' metrics."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.coordinator.observe.report.curves import Row

# Match log lines of common.rpc.server and of the coordinator's reward and rollout clients, written as text or JSON.
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* \w (?:\w+ )?services\.\S+: (.*)")
_CALL = re.compile(r"/lockstep\.\S+/(?P<where>\w+): (?P<reason>[A-Z_]+) (?P<text>.*)")
_SCORER = re.compile(r"prompt \S+: scorer (?P<where>.+?): (?P<reason>[A-Z_]+): (?P<text>.*)")
_EPISODE = re.compile(r"prompt \S+ sample \d+: environment: (?P<reason>[a-z_]+): (?P<text>.*)")
_REPLICA = re.compile(r"lost replica (?P<where>\S+): (?P<text>.*)")
_DROPPED = "sampling/dropped_"
# Metric -> reason and explanation.
_WARNINGS = {
    "warning/entropy_collapse": ("ENTROPY_COLLAPSE", "entropy is below observability.warnings.entropy_ratio"),
    "warning/steps_without_mixed_group": ("NO_MIXED_GROUP", "no group had different rewards: nothing was learned"),
}
_MAX_TEXT = 400


@dataclass
class Failure:
    """Describes one kind of failure: how often it occurred, when it last did, and its last message."""

    what: str
    reason: str
    count: int
    last: str
    text: str


def failures(run_dir: Path, steps: Sequence[Row]) -> list[Failure]:
    """Returns refused calls, samples without a score, failed episodes, lost replicas, dropped groups and warnings about
    steps from which little was learned, most frequent first.
    """
    found: dict[tuple[str, str], Failure] = {}
    for failure in (*_logged(run_dir), *_dropped(steps), *_warnings(steps)):
        before = found.setdefault((failure.what, failure.reason), failure)
        if before is not failure:
            before.count += failure.count
            before.last, before.text = failure.last, failure.text
    return sorted(found.values(), key=lambda failure: -failure.count)


def _logged(run_dir: Path) -> Iterator[Failure]:
    for path in sorted((run_dir / "logs").glob("*.log")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from filter(None, (_failure(path.stem, *_read(line)) for line in lines))


def _read(line: str) -> tuple[str, str]:
    """Returns the time and message of a log line; two empty strings if it is not one of Lockstep's."""
    if not line.startswith("{"):
        found = _LINE.match(line)
        return (found[1], found[2]) if found else ("", "")
    try:
        record = json.loads(line)
    except ValueError:
        return "", ""
    return str(record.get("time", ""))[:19].replace("T", " "), str(record.get("message", ""))


def _failure(process: str, time: str, message: str) -> Failure | None:
    if found := _CALL.match(message):
        what, reason = f"{found['where']} of {process}", found["reason"]
    elif found := _SCORER.match(message):
        what, reason = f"scorer {found['where']}", found["reason"]
    elif found := _EPISODE.match(message):
        what, reason = "environment", found["reason"].upper()
    elif found := _REPLICA.match(message):
        what, reason = f"replica {found['where']}", "LOST"
    else:
        return None
    return Failure(what, reason, 1, time, found["text"][:_MAX_TEXT])


def _dropped(steps: Sequence[Row]) -> Iterator[Failure]:
    for row in steps:
        for name in (name for name in row if name.startswith(_DROPPED) and row[name]):
            reason = name.removeprefix(_DROPPED).upper()
            yield Failure("prompt groups dropped", reason, int(row[name]), f"step {row['step']}", "")


def _warnings(steps: Sequence[Row]) -> Iterator[Failure]:
    """Yields the steps with a collapsed entropy and those without a mixed group."""
    for row in steps:
        for name, (what, text) in _WARNINGS.items():
            if row.get(name):
                yield Failure("step", what, 1, f"step {row['step']}", text)
