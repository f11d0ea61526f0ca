"""Makes Megatron-Core run on CPU, over gloo, so that every layout is tested on any machine.

Reason: Megatron-Core does not check for an accelerator: it uses `device="cuda"` and `torch.cuda.xxx()`. Seen with
Megatron-Core 0.16.1 and torch 2.13.0.

`install()` must run before the first import of megatron. It gives every `megatron.core.*` module a copy of torch as its
global `torch`; in the copy, tensor factories treat "cuda" as "cpu" and `torch.cuda` is a replacement for CPU. torch
itself is not changed, so transformers and our own code use the real one, except that `Tensor.cuda()` returns the tensor
itself and `Tensor.type()` returns CUDA type names. With a GPU `install()` does nothing.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_PACKAGE = "megatron.core"
# Where one of these is installed, Megatron takes its optimizer, which needs a GPU.
_FOR_GPUS = ("transformer_engine", "apex")
_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def install() -> None:
    """Makes Megatron-Core run on CPU if there is no GPU. Later calls do nothing."""
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError(f"{_PACKAGE} was imported before the CPU shim")
    sys.meta_path.insert(0, _Finder())
    for name in _FOR_GPUS:
        sys.modules[name] = None  # type: ignore[assignment]  # to import it is an ImportError from now on
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = _type_like_cuda(torch.Tensor.type)  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                _adapt(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _adapt(module: types.ModuleType) -> None:
    if vars(module).get("torch") is torch:
        vars(module)["torch"] = _torch_on_cpu
    adapt = _MODULES.get(module.__name__.removeprefix(_PACKAGE + "."))
    if adapt is not None:
        adapt(module)


def _cpu_generator(module: types.ModuleType) -> None:
    """Replaces the two functions that use torch._C's CUDA generator.

    CPU and "CUDA" are one generator then, so the module's warning that the CPU state changed would always appear.
    """
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
    vars(module).update(
        _get_cuda_rng_state=lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )


def _experts_without_te(module: types.ModuleType) -> None:
    vars(module).setdefault("te_general_gemm", None)  # Megatron reads it, but defines it only with TransformerEngine
    # The all-to-all needs split sizes in numpy; Megatron's function converts them only if they are on a GPU.
    vars(module)["maybe_move_tensor_to_cpu"] = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


_MODULES: dict[str, Callable[[types.ModuleType], None]] = {
    "jit": lambda module: module.disable_jit_fuser(),  # torch.compile would run a C++ compiler per function and shape
    "tensor_parallel.random": _cpu_generator,
    "transformer.moe.moe_utils": _experts_without_te,
}


def _type_like_cuda(original: Callable[..., object]) -> Callable[..., object]:
    """Wraps `Tensor.type` to return names such as `torch.cuda.FloatTensor`, by which Megatron's optimizers sort."""

    @functools.wraps(original)
    def tensor_type(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return tensor_type


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if torch.device(device if device is not None else "cpu").type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


class _Stream:
    """Replaces stream and event. Work on CPU is synchronous, so the methods wait for nothing."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def _nothing(self, *args: object, **kwargs: object) -> None:
        return None

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


def _pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows - x.size(0), *x.shape[1:])])


def _all_gather(
    outputs: Sequence[torch.Tensor], x: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gathers tensors of different lengths, as NCCL does and gloo does not; expert tensor parallelism needs it."""
    rows = max(output.size(0) for output in outputs)
    if all(output.size(0) == rows for output in outputs):
        return dist.all_gather(list(outputs), x, group=group, async_op=async_op)
    padded = [x.new_empty(rows, *x.shape[1:]) for _ in outputs]
    dist.all_gather(padded, _pad_rows(x, rows), group=group)
    for output, whole in zip(outputs, padded, strict=True):
        output.copy_(whole[: output.size(0)])
    return None


def _reduce_scatter(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    rows = max(part.size(0) for part in inputs)
    if all(part.size(0) == rows for part in inputs):
        return dist.reduce_scatter(output, list(inputs), op=op, group=group, async_op=async_op)
    padded = output.new_empty(rows, *output.shape[1:])
    dist.reduce_scatter(padded, [_pad_rows(part, rows) for part in inputs], op=op, group=group)
    output.copy_(padded[: output.size(0)])
    return None


def _copy_module(module: types.ModuleType, **overrides: object) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update(vars(module))
    copy.__dict__.update(overrides, __getattr__=lambda name: getattr(module, name))
    return copy


_torch_on_cpu = _copy_module(
    torch,
    **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES},
    distributed=_copy_module(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter),
    cuda=_copy_module(
        torch.cuda,
        current_device=lambda: _CPU,  # only ever used as device=
        synchronize=lambda *args, **kwargs: None,
        Stream=_Stream,
        Event=_Stream,
        current_stream=_Stream,
        stream=lambda *args, **kwargs: contextlib.nullcontext(),
        get_rng_state=lambda device=None: torch.get_rng_state(),
        manual_seed=torch.default_generator.manual_seed,
    ),
)
