"""Imports and calls a user's advantage estimator, named in `advantage.import_path`."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.common.errors import InvalidInput
from services.common.import_path import load_function, require_function
from services.coordinator.rl.advantages.samples import Samples

_FIELD = "advantage.import_path"


def python(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Calls the user's function, which returns one float64 advantage per trained token [M] like every kind.

    Raises:
        InvalidInput: The function cannot be imported, or its result is not finite or not of shape [M].
    """
    result = load_function(config.import_path, field=_FIELD)(samples, config, **config.kwargs)
    advantages_M = np.asarray(result, np.float64)
    if advantages_M.shape != samples.position_M.shape or not np.isfinite(advantages_M).all():
        raise InvalidInput(
            f"{_FIELD}: {config.import_path} returned an array of shape {list(advantages_M.shape)}; it must return "
            f"one finite number for each of the {samples.position_M.size} trained tokens",
            field=_FIELD,
        )
    return advantages_M


def require_importable(config: AdvantageConfig) -> None:
    """Checks, before a run starts, that the user's function exists, if the config names one.

    Raises:
        InvalidInput: The function cannot be imported, or does not take its arguments.
    """
    if config.import_path:
        require_function(config.import_path, ("samples", "config"), config.kwargs, field=_FIELD)
