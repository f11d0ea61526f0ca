"""Lets all engines of a model use what vLLM compiled for one. Seen with vLLM 0.26.0 (CUDA) and 0.32.0 (CPU).

Reason: vLLM looks compiled models up by a hash of its config, which includes the model's path. Every engine has its
model card in a folder of its own, so each start would compile again, for a minute or more. What the card contains is
in the hash as well.
"""

import copy
import functools
from typing import Any

from vllm.config import ModelConfig


def ignore_model_path() -> None:
    """Leaves the model's path out of the hash, in this process."""
    with_path: Any = ModelConfig.compute_hash
    if hasattr(with_path, "__wrapped__"):
        return

    @functools.wraps(with_path)
    def compute_hash(self: ModelConfig) -> str:
        anonymous = copy.copy(self)
        anonymous.model = ""
        return with_path(anonymous)

    ModelConfig.compute_hash = compute_hash
