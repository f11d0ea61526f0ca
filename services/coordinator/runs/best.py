"""Finds the best evaluation of a run, and whether the run has stopped improving. Both follow from the ledger."""

from collections.abc import Mapping, Sequence

from services.common.config.evaluation import BestConfig, EarlyStoppingConfig
from services.common.errors import InvalidInput
from services.coordinator.runs.ledger import Decision, Kind, Ledger
from services.coordinator.runs.scorer_change import change_between


def evaluations(ledger: Ledger, last: int) -> list[Decision]:
    """Returns the evaluation of each version up to `last`, oldest first.

    A run that went back to an older checkpoint may have evaluated a version twice: only the weights that the run has
    now count. Only evaluations by the scorers and the environment of the newest one count: those by others cannot be
    compared with it.
    """
    newest = {row["version"]: row for row in ledger.all(Kind.EVALUATED) if row["version"] <= last}
    versions = [one for one in sorted(newest) if ledger.is_newer(Kind.EVALUATED, Kind.FINISHED, one)]
    return [newest[version] for version in versions if not change_between(ledger, version, versions[-1])]


def require_metric(metrics: Mapping[str, float], config: BestConfig, field: str) -> None:
    """Raises InvalidInput if the metrics of an evaluation do not have the one that the config names."""
    if config.metric not in metrics:
        has = ", ".join(sorted(metrics))
        raise InvalidInput(f"{field}: there is no metric {config.metric}, only {has}", field=field)


def best_of(found: Sequence[Decision], config: BestConfig, by: float = 0.0) -> int | None:
    """Returns the index of the best evaluation, the first if several are equal; None if no value is a number.

    With `by`, a later value counts as better only if the difference is larger.
    """
    best: int | None = None
    for index, row in enumerate(found):
        value = row.get(config.metric)
        if value is None or value != value:
            continue
        if best is None or config.is_better(value, found[best][config.metric], by):
            best = index
    return best


def is_stalled(found: Sequence[Decision], config: EarlyStoppingConfig) -> bool:
    """Returns whether the last `patience` evaluations have brought no better value."""
    best = best_of(found, config, config.min_delta)
    return best is not None and len(found) - 1 - best >= config.patience
