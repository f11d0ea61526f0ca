"""Which models this backend computes as transformers does. The others are refused when a run is opened."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from services.common.errors import InvalidInput
from services.trainer.checkpoint.model_files import tensor_files
from services.trainer.compat.transformers import ignored_tensors

# What some architectures do to logits after the output layer, which is left out here.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# Of old checkpoints; it is computed from the config.
_COMPUTED = r"rotary_emb\.inv_freq$"


def require_supported(hf_config: PretrainedConfig, causal_lm: PreTrainedModel) -> None:
    """Log-probabilities come from the output layer's weight alone, and packed sequences only meet in attention.

    Raises:
        InvalidInput: The model's logits are more than that, or a layer would mix the sequences of a pack.
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
    if any(getattr(module, "sliding_window", None) for module in modules):  # 0 is none, as of Qwen2-MoE
        _refuse("sliding_window in its config.json")
    if any(isinstance(module, nn.Conv1d) for module in modules):
        _refuse("convolutions over tokens")


def require_all_published(causal_lm: PreTrainedModel, model_path: str, published: Iterable[str]) -> None:
    """An engine starts without weights, and would compute with whatever is where nothing was sent.

    Raises:
        InvalidInput: The checkpoint has a tensor that is not among `published`, nor tied to another, nor left out by
            transformers on purpose.
    """
    known = {*published, *causal_lm.all_tied_weights_keys}
    ignored = [_COMPUTED, *ignored_tensors(causal_lm)]
    for name in sorted(tensor_files(Path(model_path)).keys() - known):
        if not any(re.search(pattern, name) for pattern in ignored):
            _refuse(f"{name} in its checkpoint, which transformers does not load,")


def _refuse(what: str) -> NoReturn:
    message = f"model: {what} is not supported with strategy fsdp"
    raise InvalidInput(message, field="model")
