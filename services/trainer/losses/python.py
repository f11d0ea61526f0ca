"""Calls a policy loss that the user wrote, imported from `trainer.loss.import_path`."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.common.errors import InvalidInput
from services.common.import_path import load_function, require_function
from services.trainer.losses.terms import Tokens

_FIELD = "trainer.loss.import_path"


def python(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Calls the user's function, which returns the loss [N] of each token and metrics [N] as every kind does.

    Raises:
        InvalidInput: The function cannot be imported, or one of its results does not have shape [N].
    """
    losses_N, metrics = load_function(config.import_path, field=_FIELD)(tokens, config, **config.kwargs)
    for name, values_N in {"loss": losses_N, **metrics}.items():
        if values_N.shape != tokens.logprobs_N.shape:
            raise InvalidInput(
                f"{_FIELD}: {config.import_path} returned {name} of shape {list(values_N.shape)}; "
                f"it must have one value for each of the {len(tokens.logprobs_N)} tokens",
                field=_FIELD,
            )
    return losses_N, metrics


def require_importable(config: LossConfig) -> None:
    """Imports the user's function, if the config names one, so that a mistake is found before the run starts.

    Raises:
        InvalidInput: The function cannot be imported, or does not take its arguments.
    """
    if config.import_path:
        require_function(config.import_path, ("tokens", "config"), config.kwargs, field=_FIELD)
