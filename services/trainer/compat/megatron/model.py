"""Changes a model's chunks where Megatron has no setting for it, and takes them apart at the end.

Seen with Megatron-Core 0.16.1, on GPU with TransformerEngine 2.12.0.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel


class HiddenStateModel(GPTModel):
    """A GPTModel whose last stage returns hidden states too.

    Reason: GPTModel itself goes on to whole logits, or to the loss of given labels.
    """

    # GPTModel calls it with keywords only.
    def _postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return hidden_states


def set_class(module: torch.nn.Module, cls: type) -> None:
    """Makes `module` an instance of `cls`, a subclass of its own class whose __init__ does nothing more.

    Reason: layer specs cannot say of the output layer, nor of a layer that is made by TransformerEngine on GPU and by
    torch on CPU, which subclass to make; and a wrapper around it would change the names of its parameters.
    """
    module.__class__ = cls


def add_gradients_in_place(chunks: Iterable[torch.nn.Module]) -> None:
    """Has TransformerEngine's products add to the buffer of gradients: nothing is rounded before, or copied.

    Reason: Megatron's key for it, gradient_accumulation_fusion, needs Apex, for an output layer that is not used here.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # pyright: ignore[reportArgumentType]  a plain attribute


def take_apart(chunks: Iterable[torch.nn.Module]) -> None:
    """Breaks the cycles of chunks, wrapped or not, so that their memory and groups are freed; nothing can use them.

    Reason: the cycles go through C++ (DDP's gradient accumulators, the float32 weight that a parameter keeps), where
    Python's collector does not see them, and a cache of the rotary embedding's class holds instances.
    """
    RotaryEmbedding.forward.cache_clear()
    for chunk in chunks:
        getattr(chunk, "grad_accs", []).clear()
        for parameter in chunk.parameters():
            vars(parameter).pop("main_param", None)
        for module in list(chunk.modules()):
            vars(module).clear()
