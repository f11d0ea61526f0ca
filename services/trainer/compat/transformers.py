"""Wraps private attributes of transformers that the trainer needs. Seen with transformers 5.17.0 and 5.19.0."""

from collections.abc import Iterable

from transformers import PreTrainedModel

from services.common.compat.versions import require_version

require_version("transformers")


def ignored_tensors(causal_lm: PreTrainedModel) -> Iterable[str]:
    """Returns regular expressions for the checkpoint tensors that the model does not load on purpose.

    Reason: transformers keeps them in a private attribute of the model.
    """
    return causal_lm._keys_to_ignore_on_load_unexpected or ()
