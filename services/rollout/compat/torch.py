"""Hooks into every operator that torch runs. Seen with torch 2.11.0 (CUDA) and 2.13.0 (CPU)."""

from collections.abc import Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.common.compat.versions import require_version

require_version("torch")


class OperatorWatch(TorchDispatchMode):
    """Inside its `with` block, calls `see` after every operator.

    Reason: the class that sees operators below autograd, where views and copies can be told apart, is in a private
    module, and so is the function that flattens an operator's nested arguments.
    """

    def see(self, func: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Receives an operator with its input and output tensors. Subclasses must define it."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.see(func, _tensors((args, kwargs)), _tensors(result))
        return result


def writes_input(func: OpOverload) -> bool:
    """Returns whether the operator writes to one of its inputs.

    Reason: only the operator's private schema says so.
    """
    return func._schema.is_mutable


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
