"""Changes a model's chunks where Megatron has no setting for it, and frees them at the end.

Seen with Megatron-Core 0.16.1, on GPU with TransformerEngine 2.12.0.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel


class HiddenStateModel(GPTModel):
    """Returns hidden states on the last pipeline stage too.

    Reason: GPTModel itself computes whole logits there, or the loss of given labels.
    """

    # GPTModel calls it with keywords only.
    def _postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return hidden_states


def add_gradients_in_place(chunks: Iterable[torch.nn.Module]) -> None:
    """Makes TransformerEngine's GEMMs add gradients into the gradient buffer, without rounding or copying them first.

    Reason: Megatron's setting for it, gradient_accumulation_fusion, requires Apex for its output layer, which Lockstep
    does not use.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # pyright: ignore[reportArgumentType]  a plain attribute


def take_apart(chunks: Iterable[torch.nn.Module]) -> None:
    """Breaks the reference cycles of chunks, wrapped or not, to free their memory and groups. Do not use them then.

    Reason: the cycles go through C++ (DDP's gradient accumulators, the float32 weight that a parameter keeps), where
    Python's garbage collector does not see them, and a cache on the rotary embedding's class keeps instances alive.
    """
    RotaryEmbedding.forward.cache_clear()
    for chunk in chunks:
        getattr(chunk, "grad_accs", []).clear()
        for parameter in chunk.parameters():
            vars(parameter).pop("main_param", None)
        for module in list(chunk.modules()):
            vars(module).clear()
