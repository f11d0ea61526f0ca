"""Events of several processes have handles, and memory outside of torch's allocator is what torch takes it for."""

import pytest
import torch

from services.common.compat import cuda

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)


@needs_gpu
def test_events_have_handles() -> None:
    assert callable(torch.cuda.Event.from_ipc_handle) and callable(torch.cuda.Event.ipc_handle)


@needs_gpu
def test_a_tensor_is_the_memory_at_an_address() -> None:
    torch.cuda.set_device(GPU)
    address = cuda.allocate(1 << 20)
    tensor = cuda.tensor_at(address, 1 << 20, GPU)
    assert (tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.device) == (address, 1 << 20, torch.uint8, GPU)
    held = torch.cuda.memory_allocated(GPU)
    tensor.fill_(7)
    assert torch.cuda.memory_allocated(GPU) == held
    assert int(tensor.sum()) == 7 << 20
    assert len(cuda.memory_handle(address)) == len(cuda.SharedEvent.new().handle) == cuda.HANDLE_BYTES
    cuda.free(address)


@needs_gpu
def test_what_cuda_refuses_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle: CUDA error"):
        cuda.map_memory(bytes(cuda.HANDLE_BYTES))
    with pytest.raises(RuntimeError, match="cudaMalloc: CUDA error"):
        cuda.allocate(1 << 50)
    torch.cuda.synchronize()
    assert torch.ones(1, device=GPU).item() == 1  # neither error stays
