"""Allocates GPU memory that another process of the host can map, with the CUDA runtime that torch has loaded.

Reason: torch shares memory between processes only with pickle, and not if its allocator uses expandable segments. NCCL
refuses two members on one GPU. Seen with CUDA 13.0 and torch 2.11.0.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from services.common.compat import require_version

require_version("torch")

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag that cudaIpcOpenMemHandle takes


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Span:
    """A range of GPU memory that torch uses and does not own."""

    def __init__(self, pointer: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class SharedEvent:
    """An event that two processes record and wait for on one device.

    Reason: torch's type stubs lack the methods that make its events usable by several processes.
    """

    def __init__(self, event: Any, handle: bytes):
        self._event, self.handle = event, handle

    @classmethod
    def new(cls) -> "SharedEvent":
        """Returns a new event. It is recorded once, because it has no handle until then."""
        event: Any = torch.cuda.Event(interprocess=True)
        event.record()
        return cls(event, bytes(event.ipc_handle()))

    @classmethod
    def of(cls, handle: bytes, device: torch.device) -> "SharedEvent":
        events: Any = torch.cuda.Event
        return cls(events.from_ipc_handle(device, handle), handle)

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        """Makes the current stream wait until the last recorded point is reached."""
        self._event.wait()


def device_uuid(device: torch.device) -> str:
    cuda: Any = torch.cuda
    return str(cuda.get_device_properties(device).uuid)


def allocate(num_bytes: int) -> int:
    """Returns the address of new memory on the current device, outside of torch's allocator."""
    pointer = ctypes.c_void_p()
    _check(_runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes)), "cudaMalloc")
    return pointer.value or 0


def free(address: int) -> None:
    """Frees memory that `allocate` returned. Waits for the device."""
    _check(_runtime().cudaFree(ctypes.c_void_p(address)), "cudaFree")


def memory_handle(address: int) -> bytes:
    """Returns the handle with which another process maps memory that `allocate` returned."""
    handle = _Handle()
    _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address)), "cudaIpcGetMemHandle")
    return bytes(bytearray(handle))


def map_memory(handle: bytes) -> int:
    """Maps another process's memory and returns its address here. A second mapping of the same handle fails."""
    pointer = ctypes.c_void_p()
    given = _Handle.from_buffer_copy(handle)
    code = _runtime().cudaIpcOpenMemHandle(ctypes.byref(pointer), given, ctypes.c_uint(_ENABLE_PEER_ACCESS))
    _check(code, "cudaIpcOpenMemHandle")
    return pointer.value or 0


def unmap_memory(address: int) -> None:
    """Ends a mapping of `map_memory`. Waits for the device."""
    _check(_runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(address)), "cudaIpcCloseMemHandle")


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns a uint8 tensor [num_bytes] of memory that the caller keeps as long as the tensor is used."""
    return torch.as_tensor(_Span(address, num_bytes), device=device)


@cache
def _runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime library of this process."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(_loaded(f"libcudart.so.{major}"))
    except OSError as error:
        raise RuntimeError(f"the CUDA runtime of torch, libcudart.so.{major}, cannot be loaded: {error}") from error
    library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    return library


def _loaded(name: str) -> str:
    """Returns the path of the library `name` that this process has loaded, or `name` if there is none."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = (line.split(maxsplit=5)[-1].strip() for line in maps)
        return next((path for path in paths if path.rpartition("/")[2].startswith(name)), name)


def _check(code: int, what: str) -> None:
    if code:
        _runtime().cudaGetLastError()  # forgets the error, which torch would otherwise report in its next call
        raise RuntimeError(f"{what}: CUDA error {code}")
