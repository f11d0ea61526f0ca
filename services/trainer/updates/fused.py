"""Element-wise work as few kernels on GPU, by torch.compile."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def fused_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled if its first argument is on a GPU. As written on CPU, which then needs no compiler."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)  # late: it imports the compiler

    @functools.wraps(function)
    def call(first: torch.Tensor, *args: Any) -> Any:
        return (compiled() if first.is_cuda else function)(first, *args)

    return call
