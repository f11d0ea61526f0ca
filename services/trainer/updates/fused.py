"""Fuses element-wise operations into few kernels on GPU with torch.compile."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def fused_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, compiled for calls whose first argument is on a GPU. CPU calls run it as written.

    A host without GPUs therefore needs no compiler.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)  # not at decoration, because it imports the compiler

    @functools.wraps(function)
    def call(first: torch.Tensor, *args: Any) -> Any:
        return (compiled() if first.is_cuda else function)(first, *args)

    return call
