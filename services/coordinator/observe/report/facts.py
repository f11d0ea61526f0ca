"""Collects the facts at the top of the page: the run's identity, progress and library versions."""

import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from services.common.errors import DataLoss
from services.coordinator.observe.report.curves import Row
from services.coordinator.runs.evaluations import change_between
from services.coordinator.runs.ledger import Decision, Kind
from services.coordinator.runs.reader import LedgerReader, is_running


class Head(TypedDict):
    """Describes the run as a whole."""

    name: str
    state: str
    facts: list[tuple[str, str]]
    """Label and value."""
    config: str


def head(run_dir: Path, ledger: LedgerReader, rows: Sequence[Row]) -> Head:
    """Returns the facts of a run from its ledger, and its last step from `rows`.

    Raises:
        DataLoss: The ledger has no record that the run was opened.
    """
    opened = ledger.last(Kind.OPENED)
    if opened is None:
        raise DataLoss(f"{run_dir}: the ledger has no row that opened the run")
    config = json.loads(opened["config"])
    version = int(max((row["step"] for row in rows), default=0))
    num_steps = config["num_steps"]  # None if the length is set in epochs
    sessions = _sessions(ledger)
    began, duration_s = sessions[0][0], sum(end - begin for begin, end in sessions)
    facts = {
        "run": opened["run_id"],
        "model": config["model"],
        "steps": f"{version:,} of {num_steps:,}" if num_steps else f"{version:,}",
        "began": f"{datetime.datetime.fromtimestamp(began, datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "duration": _duration(duration_s) + (f" in {len(sessions)} sessions" if len(sessions) > 1 else ""),
        "held-out": _held_out(ledger),
        "early stopping": _early(ledger, version),
        "error": _error(ledger),
        "seed": str(config.get("seed", "")),
        "config digest": hashlib.sha256(opened["config"].encode()).hexdigest(),
        "data digest": (ledger.last(Kind.COLLECTED) or {}).get("dataset", ""),
        "versions": _versions(opened),
    }
    return {
        "name": config["name"],
        "state": _state(run_dir, ledger, version, num_steps),
        "facts": [(label, value) for label, value in facts.items() if value],
        "config": json.dumps(config, indent=1, ensure_ascii=False),
    }


def _state(run_dir: Path, ledger: LedgerReader, version: int, num_steps: int | None) -> str:
    if is_running(run_dir):
        return "running"
    if ledger.failure():
        return "failed"
    if num_steps is None:
        return "ended"
    return "done" if version >= num_steps or ledger.last(Kind.STOPPED, version) else "stopped"


def _early(ledger: LedgerReader, version: int) -> str:
    """Returns why early stopping ended the run after `version`; an empty string if it did not."""
    stopped = ledger.last(Kind.STOPPED, version)
    if stopped is None:
        return ""
    return f"{stopped['metric']} was best after step {stopped['best_version']}, with {stopped['best_value']:.3g}"


def _error(ledger: LedgerReader) -> str:
    """Returns the error that ended the last session; an empty string if none did."""
    failed = ledger.failure()
    return f"{failed['reason']}: {failed['message'].splitlines()[0]}" if failed else ""


def _sessions(ledger: LedgerReader) -> list[tuple[float, float]]:
    """Returns the times of the first and last decision of each session, in seconds since 1970.

    A session is one opening of the run by a coordinator.
    """
    sessions: list[tuple[float, float]] = []
    for time_s, kind in ledger.times():
        is_first = kind == Kind.OPENED or not sessions
        begin = time_s if is_first else sessions.pop()[0]
        sessions.append((begin, time_s))
    return sessions


def _held_out(ledger: LedgerReader) -> str:
    """Returns the first and last reward, or loss, of the first held-out set as text."""
    evaluations = ledger.all(Kind.EVALUATED)
    names = [name for name in (evaluations[0] if evaluations else {}) if name.endswith(("/reward", "/nll"))]
    if not names:
        return ""
    first, last = (evaluation.get(names[0], float("nan")) for evaluation in (evaluations[0], evaluations[-1]))
    what = names[0].removeprefix("eval/")
    change = change_between(ledger, evaluations[0]["version"], evaluations[-1]["version"])
    return (
        f"{what} {first:.3f}"
        + (f" → {last:.3f}" if len(evaluations) > 1 else "")
        + (f", not to be compared: {change}" if change else "")
    )


def _versions(opened: Decision) -> str:
    versions = opened.get("versions")
    return ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else "not recorded"


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"
