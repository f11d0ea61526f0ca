"""Process groups without global state, copies of many tensors at once, a watch on operators, and versions.

Seen with torch 2.11.0 (CUDA) and 2.13.0 (CPU).
"""

# pyright: reportPrivateImportUsage=false
# torch exports its stores and process groups without saying so, and types only some of what backend objects have.

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions
from torch._ops import OpOverload
from torch.cuda import nccl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.common.compat import require_version

require_version("torch")

# On an H200 the kernel for many tensors moved 3.1 TB/s, and a copy of one large tensor 4.2 TB/s.
_LARGE_BYTES = 16 << 20


class Copies:
    """Copies each source into its target, as often as `run` is called.

    Reason: a `copy_` costs a launch each, so one kernel copies all small tensors, and torch has no public function for
    that. It falls back to a `copy_` for each if a single tensor is not contiguous, so those are copied separately.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]):
        self._alone: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        for target, source in zip(targets, sources, strict=True):
            is_dense = source.is_contiguous() and target.is_contiguous()
            if source.nbytes > _LARGE_BYTES or not is_dense:
                self._alone.append((target, source))
            else:
                self._targets.append(target)
                self._sources.append(source)

    def run(self, *, non_blocking: bool = False) -> None:
        for target, source in self._alone:
            target.copy_(source, non_blocking=non_blocking)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources, non_blocking=non_blocking)  # pyright: ignore[reportPrivateUsage]


def gloo_group(store: dist.Store, rank: int, world_size: int, *, address: str, timeout: timedelta) -> dist.ProcessGroup:
    """Makes a gloo backend object on the network interface that has `address`.

    Reason: new_group uses the global state of torch.distributed, which belongs to Megatron or vLLM. The options of a
    backend object, interface and timeout, have no public setters.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, rank, world_size, options)


def nccl_group(
    store: dist.Store, rank: int, world_size: int, *, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Makes an NCCL backend object, connected to all members.

    Reason: the same as for gloo_group. Without the eager connection a member would connect in its first collective.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, rank, world_size, options)
    group.eager_connect_single_device(device)
    return group


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, root: int) -> dist.Work:
    """Starts the broadcast of `tensor` from member `root`.

    Reason: dist.broadcast takes only groups that torch.distributed knows, and the options of a backend object's own
    method are in a private module.
    """
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([tensor], options)


def allreduce(group: dist.ProcessGroup, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
    """Starts the reduction of `tensor` in place.

    Reason: the same as for `broadcast`.
    """
    options: Any = AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([tensor], options)


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
    return func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def accelerator_libraries() -> dict[str, str]:
    """Returns the versions of CUDA and NCCL that this process's torch was built with; empty for a CPU build."""
    if torch.version.cuda is None:
        return {}
    return {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl.version()))}
