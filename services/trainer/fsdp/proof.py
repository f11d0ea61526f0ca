"""Proves that a model computes packed sequences as transformers computes each alone, on a small copy of the model.

No list says which models are right: what differs is refused with the difference.
"""

import torch
from transformers import PretrainedConfig

from services.common.errors import InvalidInput
from services.common.rpc.progress import PROGRESS
from services.trainer.fsdp.model import Layout, LogprobModel
from services.trainer.proof import MOST_NATS, make_reference

_proven: dict[str, Layout] = {}


def layout_of(config: PretrainedConfig) -> Layout:
    """Returns the first layout in which the model's log-probabilities are those of transformers.

    Raises:
        InvalidInput: There is none.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _proven:  # a trainer opens the same model for several roles, and again for each run
        with PROGRESS.stage("compare a small copy of the model with transformers"):
            _proven[key] = _prove(config)
    return _proven[key]


def _prove(config: PretrainedConfig) -> Layout:
    problems: list[str] = []
    for layout in Layout:
        try:
            difference = largest_difference(config, layout)
        except InvalidInput as error:
            problems.append(error.message)
        except Exception as error:  # noqa: BLE001 a family's code may fail in any way on what it was not written for
            problems.append(f"{error!r}")
        else:
            if difference <= MOST_NATS:  # which NaN is not
                return layout
            problems.append(f"log-probabilities differ by up to {difference:.2g} nats")
    raise InvalidInput(
        f"model: model_type {config.model_type} is not supported with strategy fsdp: compared with transformers on "
        f"single sequences, packed: {problems[0]}; in padded rows: {problems[1]}",
        field="model",
    )


@torch.no_grad()
def largest_difference(config: PretrainedConfig, layout: Layout) -> float:
    """Returns the largest difference of log-probabilities, in nats, from transformers on single sequences."""
    reference = make_reference(config)
    return reference.difference(LogprobModel(reference.model, layout)(reference.packed(), 1.0)[0])
