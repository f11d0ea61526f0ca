"""Wraps private functions of torch that the trainer needs. Seen with torch 2.11.0 (CUDA) and 2.13.0 (CPU)."""

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from services.common.compat import require_version

require_version("torch")

# Grouped-query attention of varlen_attn: torch before 2.12 has no argument for it and always allows it.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
GROUPED_ALIGN_BYTES = 16
"""torch's grouped matrix product, which computes experts, needs rows of a multiple of this."""


def record_allocations(max_events: int) -> None:
    """Records the last `max_events` allocations and frees of GPU memory, with Python stacks.

    Reason: torch documents its memory snapshots, but their functions have private names.
    """
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_events, clear_history=True)


def stop_recording() -> None:
    """Stops `record_allocations` and discards the recorded events."""
    torch.cuda.memory._record_memory_history(enabled=None)


def allocations() -> Mapping[str, object]:
    """Returns the current allocations and the recorded events as plain values; torch's own dump would pickle them."""
    return torch.cuda.memory._snapshot()


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number that is equal for tensors that share a storage, even if it was resized to 0 bytes.

    Reason: one storage can have several Python objects, and after a resize to 0 its address is 0.
    """
    return tensor.untyped_storage()._cdata


def discard_unreduced_gradients(model: nn.Module) -> None:
    """Discards gradients of micro-batches that FSDP has not summed over ranks yet.

    Reason: after a micro-batch that fails, FSDP would add those of the micro-batches before it to the next update.
    """
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # it has been in a forward pass
                parameter.unsharded_param.grad = None


def is_in_backward() -> bool:
    """Returns whether the caller runs inside a backward pass, where checkpointed layers are computed again.

    Reason: torch has no public function for it. Its own checkpoints use this one.
    """
    return torch._C._current_graph_task_id() != -1


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Returns whether the module's checkpoints contain the buffer.

    Reason: torch has no public function for it.
    """
    return buffer not in module._non_persistent_buffers_set


class AttentionWithSinks(torch.autograd.Function):
    """Computes `varlen_attn`, [T, H, D], with a sink for each head: a key of a given logit and the value 0 (gpt-oss).

    `settings` are the bounds of the sequences, the longest of them, the window and the scale, as `varlen_attn` takes
    them.

    With the sink's part in the sum of exponentials, outputs and gradients are those that the kernel computes from the
    larger sum; it ignores the gradient of its own sum, so it cannot be left to autograd.

    Reason: torch has no sinks, and its operator for the backward pass has a private name.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        sinks_H: torch.Tensor,
        settings: "tuple[torch.Tensor, int, tuple[int, int], float]",
    ) -> torch.Tensor:
        cu_seqlens, longest, window, scale = settings
        qkv, lengths = (query_THD, key_TKD, value_TKD), (cu_seqlens, cu_seqlens, longest, longest)
        aux = AuxRequest(lse=True)
        out_THD, log_sum_HT = varlen_attn(*qkv, *lengths, window_size=window, scale=scale, return_aux=aux, **GROUPED)
        larger_HT = torch.logaddexp(log_sum_HT, sinks_H.float()[:, None])
        out_THD = out_THD * (log_sum_HT - larger_HT).exp().T[:, :, None].to(out_THD.dtype)
        ctx.settings = settings
        ctx.save_for_backward(*qkv, sinks_H, out_THD, larger_HT)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query_THD, key_TKD, value_TKD, sinks_H, out_THD, larger_HT = ctx.saved_tensors
        cu_seqlens, longest, window, scale = ctx.settings
        grads = torch.ops.torch_attn._varlen_attn_backward(
            grad_THD.contiguous(),
            *(query_THD, key_TKD, value_TKD, out_THD, larger_HT),
            *(cu_seqlens, cu_seqlens, longest, longest, window == (-1, 0)),
            torch.zeros(2, dtype=torch.uint64, device=query_THD.device),  # of a dropout, which there is not
            scale,
            list(window),
        )
        share_HT = (sinks_H.float()[:, None] - larger_HT).exp()
        grad_sinks_H = -(share_HT * (grad_THD.float() * out_THD.float()).sum(-1).T).sum(1)
        return *grads, grad_sinks_H.to(sinks_H.dtype), None


def set_class(module: Any, cls: type) -> None:
    """Makes `module` an instance of `cls`, a subclass of its class that has no __init__ of its own.

    Reason: an adapter must not change the names of a layer's parameters, as a wrapper would. In Megatron, a layer spec
    cannot name a class for the output layer, nor a subclass of a layer that TransformerEngine makes on GPU and torch on
    CPU.
    """
    module.__class__ = cls


class CallableParameters(nn.ParameterDict):
    """Maps names to parameters. Calling it returns them and runs the forward hooks.

    Reason: DDP with overlap_param_gather gathers weights in forward hooks, and torch's ParameterDict cannot be called.
    """

    # ParameterDict's own __call__ only raises an error.
    __call__: Callable[..., dict[str, torch.Tensor]] = nn.Module.__call__  # pyright: ignore[reportIncompatibleMethodOverride]

    def forward(self) -> dict[str, torch.Tensor]:
        return dict(self.items())


class HostMemory:
    """Bytes of host memory; for a CUDA device they are page-locked, so that copies do not wait for the CPU.

    Reason: torch rounds page-locked tensors up to a power of two, which could double what an optimizer takes, so the
    memory is locked with the runtime library that torch exposes without types.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self.flat = torch.empty(num_bytes, dtype=torch.uint8)
        if device.type == "cuda" and num_bytes:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self.flat.data_ptr(), num_bytes, 0))
            # Before the tensor is freed. At exit the process's end is enough.
            weakref.finalize(self, runtime.cudaHostUnregister, self.flat.data_ptr()).atexit = False
