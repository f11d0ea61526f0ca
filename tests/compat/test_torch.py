"""Tests the internals of torch that the services use, and that none has a public substitute yet."""

import inspect
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from services.common.compat.torch import Copies, OperatorWatch, allreduce, broadcast, gloo_group, writes_input
from services.trainer.compat.torch import CallableParameters, HostMemory, is_in_backward, is_persistent, storage_id

TIMEOUT = timedelta(seconds=7)


def test_many_tensors_are_copied_at_once() -> None:
    targets, sources = [torch.zeros(3), torch.zeros(2, 2)], [torch.ones(3), torch.full((2, 2), 2.0)]
    Copies(targets, sources).run()
    Copies(targets[:1], [torch.full((3,), 5.0)]).run(non_blocking=True)
    assert targets[0].tolist() == [5, 5, 5] and targets[1].tolist() == [[2, 2], [2, 2]]
    sources = [torch.arange(5 << 20), torch.arange(4.0).view(2, 2).T]  # a large one, and one that is not contiguous
    sources.append(torch.ones(2, 2))
    targets = [*(torch.zeros_like(source).contiguous() for source in sources[:2]), torch.zeros(2, 3)[:, :2]]
    Copies(targets, sources).run()
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))
    assert not hasattr(torch, "foreach_copy_")  # if this fails, use that function


def test_a_gloo_group_needs_no_global_state() -> None:
    before = dist.is_initialized()  # another test of this process may have initialized it
    group = gloo_group(dist.HashStore(), 0, 1, address="127.0.0.1", timeout=TIMEOUT)
    assert dist.is_initialized() == before
    assert group.options._timeout == TIMEOUT
    flat = torch.arange(4.0)
    broadcast(group, flat, 0).wait()
    allreduce(group, flat, dist.ReduceOp.MIN).wait()
    assert flat.tolist() == [0, 1, 2, 3]


def test_the_public_broadcast_wants_global_state() -> None:
    group = gloo_group(dist.HashStore(), 0, 1, address="127.0.0.1", timeout=TIMEOUT)
    with pytest.raises(ValueError, match=r"not registered|not initialized"):
        dist.broadcast(torch.zeros(1), 0, group=group)


def test_an_nccl_group_has_the_options_that_are_set() -> None:
    if not hasattr(dist, "ProcessGroupNCCL"):  # a torch for CPU has its stubs only, which leave out _timeout
        stubs = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
        nccl = stubs.split("class ProcessGroupNCCL(", 1)[1].split("\nclass ", 1)[0]
        assert "class Options(Backend.Options)" in nccl
        backend = stubs.split("class Backend:", 1)[1].split("\nclass ", 1)[0]
        assert "def eager_connect_single_device(self, device: torch.device | None)" in backend + nccl
        return
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    assert options._timeout == TIMEOUT and callable(dist.ProcessGroupNCCL.eager_connect_single_device)


class Seen(OperatorWatch):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, bool, int, int]] = []

    def see(self, func, inputs, outputs) -> None:
        self.operators.append((str(func), writes_input(func), len(inputs), len(outputs)))


def test_a_watch_sees_every_operator_and_whether_it_writes() -> None:
    target, source = torch.zeros(2, 2), torch.ones(4)
    with Seen() as seen:
        target.copy_(source.view(2, 2))
        torch.cat([target, target])
        target.zero_()
    target.zero_()
    assert seen.operators == [
        ("aten.view.default", False, 1, 1),
        ("aten.copy_.default", True, 2, 1),
        ("aten.cat.default", False, 2, 1),
        ("aten.zero_.default", True, 1, 1),
    ]


def test_the_public_mode_sees_no_operators() -> None:
    """If this fails, Recorder can be such a mode.

    The mode of torch.overrides sees functions as they are called, not the operators that they run.
    """
    from torch.overrides import TorchFunctionMode

    assert not hasattr(TorchFunctionMode, "__torch_dispatch__")


def test_allocations_are_recorded_with_these_arguments() -> None:
    arguments = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "stacks", "max_entries", "clear_history"} <= arguments.keys()
    assert all(p.default is not p.empty for p in inspect.signature(torch.cuda.memory._snapshot).parameters.values())


def test_a_backward_pass_is_noticed_also_inside_of_checkpoints() -> None:
    seen: list[bool] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_in_backward())
        return x.exp()

    for reentrant in (False, True):
        x = torch.ones(2, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True, False, True]
    assert not is_in_backward()
    assert not hasattr(torch.autograd, "is_in_backward")  # if this fails, use that function


def test_a_storage_keeps_its_number_without_memory() -> None:
    whole, other = torch.arange(8.0), torch.ones(8)
    views = [whole[:3], whole[3:]]
    assert {storage_id(view) for view in views} == {storage_id(whole)} != {storage_id(other)}
    before = storage_id(whole)
    for tensor in (whole, other):
        tensor.untyped_storage().resize_(0)
    assert storage_id(whole) == before != storage_id(other)
    assert whole.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() == 0  # public, but equal for both


def test_buffers_that_are_saved_are_known() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("computed", torch.zeros(1), persistent=False)
    assert is_persistent(module, "saved") and not is_persistent(module, "computed")
    assert list(module.state_dict()) == ["saved"]


def test_parameters_can_be_called_and_run_hooks() -> None:
    with pytest.raises(RuntimeError, match="should not be called"):
        nn.ParameterDict({"a": torch.zeros(1)})(torch.zeros(1))
    parameters, calls = CallableParameters({"a": torch.zeros(1)}), []
    parameters.register_forward_pre_hook(lambda *_: calls.append("hook"))
    assert list(parameters()) == ["a"] and calls == ["hook"]
    assert list(parameters.state_dict()) == ["a"]


def test_host_memory_is_page_locked_for_gpus_only() -> None:
    memory = HostMemory(1000, torch.device("cpu"))
    assert (memory.flat.numel(), memory.flat.dtype, memory.flat.is_pinned()) == (1000, torch.uint8, False)
    assert callable(torch.cuda.cudart) and callable(torch.cuda.check_error)  # HostMemory uses them with a GPU
