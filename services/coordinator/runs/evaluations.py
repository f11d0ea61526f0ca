"""Compares a run's evaluations: which were scored alike, which is the best, and whether they have stopped improving."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.config.evaluation import BestConfig, EarlyStoppingConfig
from services.common.errors import InvalidInput
from services.coordinator.runs.ledger import Decision, Kind, Ledger

log = logging.getLogger(__name__)

Versions = Mapping[str, str]
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
    now, logged = {"scorer": scorer, "environment": environment}, set[tuple[str, str, str]]()
    for source, before in (("batch", _of_batch(newest_batch)), ("evaluation", evaluated)):
        for change in _changes(before or now, now):
            if change not in logged:
                what, old, new = change
                log.warning("%s %s was %s in the newest %s of this run: rewards may differ", what, new, old, source)
            logged.add(change)


def change_between(ledger: Ledger, first: int, last: int) -> str:
    """Returns what changed from the evaluation of version `first` to that of `last`; an empty text if nothing did."""
    before, now = ledger.last(Kind.SCORED, first), ledger.last(Kind.SCORED, last)
    if before is None or now is None:  # evaluations without scorers, as of SFT
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


def comparable_evaluations(ledger: Ledger, last: int) -> list[Decision]:
    """Returns the evaluation of each version up to `last`, oldest first.

    A run that went back to an older checkpoint may have evaluated a version twice: only the weights that the run has
    now count. Only evaluations by the scorers and the environment of the newest one count: those by others cannot be
    compared with it.
    """
    newest = {row["version"]: row for row in ledger.all(Kind.EVALUATED) if row["version"] <= last}
    versions = [version for version in sorted(newest) if ledger.is_newer(Kind.EVALUATED, Kind.FINISHED, version)]
    return [newest[version] for version in versions if not change_between(ledger, version, versions[-1])]


def require_metric(metrics: Mapping[str, float], config: BestConfig, field: str) -> None:
    """Raises InvalidInput if the metrics of an evaluation do not have the one that the config names."""
    if config.metric not in metrics:
        has = ", ".join(sorted(metrics))
        raise InvalidInput(f"{field}: there is no metric {config.metric}, only {has}", field=field)


def best_of(rows: Sequence[Decision], config: BestConfig, by: float = 0.0) -> Decision | None:
    """Returns the best evaluation, the first if several are equal; None if no value is a number.

    With `by`, a later value counts as better only if the difference is larger.
    """
    best: Decision | None = None
    for row in rows:
        value = row.get(config.metric)
        if value is None or value != value:  # NaN
            continue
        if best is None or config.is_better(value, best[config.metric], by):
            best = row
    return best


def best_if_stalled(rows: Sequence[Decision], config: EarlyStoppingConfig) -> Decision | None:
    """Returns the best evaluation if the last `patience` ones have brought no better value, else None."""
    best = best_of(rows, config, config.min_delta)
    return best if best and len(rows) - 1 - rows.index(best) >= config.patience else None
