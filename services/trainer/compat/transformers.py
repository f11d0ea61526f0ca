"""Holds what the trainer needs of transformers that has no public name. Seen with transformers 5.17.0 and 5.19.0."""

from collections.abc import Iterable

from transformers import PreTrainedModel

from services.common.compat.versions import require_version

require_version("transformers")


def ignored_tensors(causal_lm: PreTrainedModel) -> Iterable[str]:
    """Returns patterns of the checkpoint's tensors that the model leaves out on purpose.

    Reason: transformers keeps them in a private attribute of the model.
    """
    return causal_lm._keys_to_ignore_on_load_unexpected or ()
