"""Refuses models that this backend would not compute as transformers does, when a run is opened."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from services.common.errors import InvalidInput
from services.trainer.checkpoint.model_files import tensor_files
from services.trainer.compat.transformers import ignored_tensors

# Settings of architectures that change logits after the output layer, which this backend does not do.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# A tensor in old checkpoints; transformers computes it from the config.
_COMPUTED = r"rotary_emb\.inv_freq$"


def require_supported(hf_config: PretrainedConfig, causal_lm: PreTrainedModel) -> None:
    """Checks that only the output layer's weight makes logits, and that no layer mixes the sequences of a pack.

    Raises:
        InvalidInput: The logits depend on something else, or a layer would mix the sequences of a pack.
    """
    for name in _LOGIT_SETTINGS:
        if getattr(hf_config, name, None) not in (None, 1):
            _refuse(f"{name} in its config.json")
    output_layer = getattr(causal_lm, "lm_head", None)
    if output_layer is None:
        _refuse("an output layer that is not lm_head")
    if output_layer.bias is not None:
        _refuse("lm_head.bias")
    if others := set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"}:
        _refuse(f"layers of type {', '.join(sorted(others))}")
    modules = (hf_config, *causal_lm.modules())
    if any(getattr(module, "sliding_window", None) for module in modules):  # 0 means none, as in Qwen2-MoE
        _refuse("sliding_window in its config.json")
    if any(isinstance(module, nn.Conv1d) for module in modules):
        _refuse("convolutions over tokens")


def require_all_published(causal_lm: PreTrainedModel, model_path: str, published: Iterable[str]) -> None:
    """Checks that the engine, which starts without weights, is sent every tensor of the checkpoint.

    Raises:
        InvalidInput: The checkpoint has a tensor that is not in `published`, is not tied to another tensor, and is not
            one that transformers ignores on purpose.
    """
    known = {*published, *causal_lm.all_tied_weights_keys}
    ignored = [_COMPUTED, *ignored_tensors(causal_lm)]
    for name in sorted(tensor_files(Path(model_path)).keys() - known):
        if not any(re.search(pattern, name) for pattern in ignored):
            _refuse(f"{name} in its checkpoint, which transformers does not load,")


def _refuse(what: str) -> NoReturn:
    message = f"model: {what} is not supported with strategy fsdp"
    raise InvalidInput(message, field="model")
