"""Wraps private attributes of transformers that the trainer needs. Seen with transformers 5.17.0 and 5.19.0."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose, WeightConverter, WeightRenaming, rename_source_key

from services.common.compat import require_version

require_version("transformers")


def ignored_tensors(causal_lm: PreTrainedModel) -> Iterable[str]:
    """Returns regular expressions for the checkpoint tensors that the model does not load on purpose.

    Reason: transformers keeps them in a private attribute of the model.
    """
    return causal_lm._keys_to_ignore_on_load_unexpected or ()


def take_layout(causal_lm: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Makes `revert_weight_conversion` return the names and shapes of these tensors of a checkpoint.

    Reason: of a model that was not loaded it leaves out prefixes and transpositions that only some checkpoints have,
    such as the `vision_model` of Gemma 3's, and those of the experts of Qwen3-VL-MoE.
    """
    conversions = get_model_conversion_mapping(causal_lm, add_legacy=False)
    prefixes = [one for one in conversions if isinstance(one, PrefixChange)]
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    own, used = causal_lm.state_dict(), set[int]()
    for name in sorted(stored):
        for one in prefixes:
            one._was_used = False
        renamed, pattern = rename_source_key(name, renamings, converters, causal_lm.base_model_prefix, own)
        if renamed not in own:
            continue
        used |= {id(one) for one in prefixes if one.was_used()}
        for converter in converters:
            for operation in converter.operations if pattern in converter.source_patterns else ():
                if isinstance(operation, Transpose) and stored[name] != own[renamed].shape:
                    operation.check_dims = False  # it would compare the model with itself
    kept = [one for one in conversions if not isinstance(one, PrefixChange) or id(one) in used]
    causal_lm._weight_conversions = kept  # type: ignore[assignment]


@contextmanager
def keeping_float32(name: str) -> Iterator[None]:
    """Makes models load the tensors with this name in float32, whatever their dtype.

    Reason: transformers' classes name such tensors in a private attribute, which some that need it do not set.
    """
    before = PreTrainedModel._keep_in_fp32_modules_strict
    PreTrainedModel._keep_in_fp32_modules_strict = [name]
    try:
        yield
    finally:
        PreTrainedModel._keep_in_fp32_modules_strict = before


# Routers whose forward calls torch.topk once on the scores of all experts, and computes with its results.
_ROUTERS = (
    "DeepseekV3TopkRouter",
    "Glm4MoeLiteTopkRouter",
    "Glm4MoeTopkRouter",
    "GptOssTopKRouter",
    "MiniMaxM2TopKRouter",
    "MixtralTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
)

# Takes the experts that the router chooses, [rows, top_k]; returns those to compute with.
Choose = Callable[[torch.Tensor], torch.Tensor]


class _Chosen(TorchFunctionMode):
    """Replaces the result of torch.topk over all experts by the scores of those that `choose` returns."""

    def __init__(self, choose: Choose, num_experts: int):
        super().__init__()
        self.num_calls = 0
        self._choose, self._num_experts = choose, num_experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk or args[0].shape[1:] != (self._num_experts,):  # others choose groups of experts
            return result
        self.num_calls += 1
        experts = self._choose(result[1])
        return args[0].gather(-1, experts), experts


def routers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Returns the routers of the model's layers of experts, in the order of the layers, if their class is known."""
    return [module for module in causal_lm.modules() if type(module).__name__ in _ROUTERS]


def set_choice(router: nn.Module, choose: Choose) -> None:
    """Makes a router compute with what `choose` returns.

    Reason: transformers has no way to give a layer its experts.
    """
    forward, num_experts = router.forward, len(router.get_parameter("weight"))

    @torch.compiler.disable  # it counts, and keeps the experts of earlier calls
    def replaying(*args: object, **kwargs: object) -> object:
        with _Chosen(choose, num_experts) as chosen:
            result = forward(*args, **kwargs)
        assert chosen.num_calls == 1, f"{type(router).__name__} called torch.topk {chosen.num_calls} times"
        return result

    router.forward = replaying
