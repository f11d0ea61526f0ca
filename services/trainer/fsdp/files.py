"""Checks a model's files before any weight is read, and reads them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from services.common.errors import InvalidInput
from services.trainer.checkpoint.model_files import (
    require_known,
    require_same_if_tied,
    require_tensors,
    stored_tensors,
)
from services.trainer.compat.transformers import ignored_tensors
from services.trainer.fsdp.weights import WeightStream


def require_loadable(causal_lm: PreTrainedModel, model_path: str, *, has_head: bool) -> None:
    """Checks that the files have exactly the tensors of the model. Without `has_head`, any output layer is accepted.

    The engine, which starts without weights, is sent the tensors of the model and no others.

    Raises:
        InvalidInput: A file is damaged, a tensor is missing, unknown or of another shape, or two tensors that
            config.json ties differ.
    """
    directory = Path(model_path)
    stored = stored_tensors(directory)
    specs = WeightStream(causal_lm, torch.float32, torch.device("cpu")).specs()
    shapes: dict[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in specs}
    tied = causal_lm.all_tied_weights_keys
    if not has_head:
        shapes.pop("lm_head.weight", None)
    for copy, original in tied.items():
        require_same_if_tied(stored, copy, original)
        if copy in stored and original not in stored:
            shapes[copy] = shapes.pop(original, stored[copy].shape)  # transformers takes either
    require_tensors(stored, shapes, directory)
    if has_head:
        require_known(stored, {*shapes, *tied, *tied.values()}, ignored_tensors(causal_lm))


def load_weights(model_path: str, *, has_head: bool, **kwargs: Any) -> PreTrainedModel:
    """Loads a model whose files `require_loadable` has checked.

    Raises:
        InvalidInput: transformers cannot load it, or has initialized weights at random.
    """
    disable_progress_bar()  # it would fill the service's log
    safe = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    try:
        answer: Any = AutoModelForCausalLM.from_pretrained(model_path, output_loading_info=True, **safe, **kwargs)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise InvalidInput(f"model: {model_path} cannot be loaded: {error!r}", field="model") from error
    loaded, loading = answer  # because of output_loading_info
    missing = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    if missing := sorted(missing if has_head else missing - {"lm_head.weight"}):
        raise InvalidInput(f"model: {model_path} has no tensor {', '.join(missing[:5])}", field="model")
    return loaded
