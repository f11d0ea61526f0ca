"""Splits rewards by the values of a column of the data, `data.metrics_column`."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from services.coordinator.data.groups import ScoredGroup
from services.coordinator.data.prompts import value_name


def rewards_by_column(groups: Sequence[ScoredGroup], column: str | None) -> dict[str, float]:
    """Returns the mean reward of the samples of each value, named `reward[<column>=<value>]`; none without a column."""
    if column is None:
        return {}
    rewards: dict[str, list[np.ndarray]] = defaultdict(list)
    for group in groups:
        rewards[value_name(group.prompt.extra.get(column))].append(group.rewards)
    return {f"reward[{column}={value}]": float(np.concatenate(rewards[value]).mean()) for value in sorted(rewards)}
