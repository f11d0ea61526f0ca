"""Notices that a run has scored with several versions of a scorer or environment, so that its rewards may differ."""

import logging
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.coordinator.runs.ledger import Kind, Ledger

log = logging.getLogger(__name__)

Versions = Mapping[str, Any]
"""Name, version and weight of the scorers (`scorer`), and name and version of the environment (`environment`)."""


def versions_of(samples: pa.Table) -> dict[str, str]:
    """Returns the versions that scored the samples of a batch or an evaluation; an empty text is none."""
    columns = (samples[name].unique().to_pylist() for name in ("scorer", "environment"))
    scorer, environment = (next(filter(None, values), "") for values in columns)  # a failed episode has no environment
    return {"scorer": scorer, "environment": environment}


def warn_of_other_versions(
    newest_batch: Path | None, scorer: str, environment: str, evaluated: Versions | None = None
) -> None:
    """Logs a line for each scorer, and for the environment, whose version is not that of what the run has scored last.

    Args:
        newest_batch: The newest batch's file; None if the run has none. A file that cannot be read is ignored here.
        scorer: Name, version and weight of the scorers, as in the batch's column.
        environment: Name and version of the environment, as in the batch's column.
        evaluated: The versions of the newest evaluation; None if the run has none.
    """
    now, said = {"scorer": scorer, "environment": environment}, set[tuple[str, str, str]]()
    for source, before in (("batch", _of_batch(newest_batch)), ("evaluation", evaluated)):
        for what, old, new in _changes(before or now, now):
            if (what, old, new) not in said:
                log.warning("%s %s was %s in the newest %s of this run: rewards may differ", what, new, old, source)
            said.add((what, old, new))


def change_between(ledger: Ledger, first: int, last: int) -> str:
    """Returns what changed from the evaluation of version `first` to that of `last`; an empty text if nothing did."""
    before, now = ledger.last(Kind.SCORED, first), ledger.last(Kind.SCORED, last)
    if before is None or now is None:  # evaluations without scorers, or recorded by an earlier version
        return ""
    return ", ".join(f"{what} {old} became {new}" for what, old, new in _changes(before, now))


def _of_batch(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        return versions_of(pq.ParquetFile(path).read_row_group(0, columns=["scorer", "environment"]))
    except (OSError, pa.ArrowException, IndexError):
        return None


def _changes(before: Versions, now: Versions) -> Iterator[tuple[str, str, str]]:
    """Yields what changed, and its old and new version, for each scorer and the environment."""
    for what in ("scorer", "environment"):
        for old, new in zip_longest(before[what].split(" + "), now[what].split(" + "), fillvalue=""):
            if old != new:
                yield what, old or "none", new or "none"
