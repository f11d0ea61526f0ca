"""Fuses element-wise operations into few kernels on GPU with torch.compile."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fused_on_gpu(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns `function`, compiled for calls whose first argument is on a GPU. CPU calls run it as written.

    A host without GPUs therefore needs no compiler.
    """

    @functools.cache
    def compiled() -> Callable[Arguments, Result]:
        return torch.compile(function, dynamic=True)  # not at decoration, because it imports the compiler

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0]
        is_on_gpu = isinstance(first, torch.Tensor) and first.is_cuda
        return (compiled() if is_on_gpu else function)(*args, **kwargs)

    return call
