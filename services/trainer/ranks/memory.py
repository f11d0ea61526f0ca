"""Moves parts of a rank's models between its device and host memory, for an engine that shares the device."""

import itertools
import time
from collections.abc import Sequence

import torch

from services.common.errors import Overloaded, Reason
from services.common.memory import DeviceState, changed, device_state, gib
from services.trainer.backend import Backend, Part, Role, groups_of
from services.trainer.ranks.calls import Message, rank_command


class MemoryCommands:
    """Implements the commands on a worker. The answer has this rank's types.v1.DeviceMemory, serialized."""

    _device: torch.device
    _backends: dict[Role, Backend]

    @rank_command
    def release_memory(self, *, model_parts: Sequence[str], roles: Sequence[str], least_free_bytes: int = 0) -> Message:
        """Moves parts of roles to host memory, one after another until the device has `least_free_bytes` free; 0 moves
        all."""
        begin, before = time.perf_counter(), self._device_state()
        self._synchronize()  # no kernel or collective in the background may use what leaves
        for part, backend in itertools.product(model_parts, self._backends_of(roles)):
            if not 0 < least_free_bytes <= self._device_state()["device_free_bytes"]:
                backend.release([Part(part)])
        return self._answer(before, begin)

    @rank_command
    def acquire_memory(self, *, model_parts: Sequence[str], roles: Sequence[str]) -> Message:
        """Moves parts of roles back to the device.

        Raises:
            Overloaded: OUT_OF_MEMORY, the device has too little. Nothing was moved.
        """
        begin, before = time.perf_counter(), self._device_state()
        groups, backends = groups_of(list(map(Part, model_parts))), self._backends_of(roles)
        needed = sum(backend.offloader.needed_bytes(*groups) for backend in backends)
        if self._device.type == "cuda" and needed > before["device_free_bytes"]:
            raise Overloaded(
                f"the trainer needs {gib(needed)} for {' and '.join(model_parts)} of {', '.join(roles)}, but "
                f"{before['device_uuid']} has only {gib(before['device_free_bytes'])} free",
                reason=Reason.OUT_OF_MEMORY,
                device_uuid=before["device_uuid"],
                needed_bytes=needed,
                free_bytes=before["device_free_bytes"],
            )
        for backend in backends:
            backend.offloader.restore(*groups)
        return self._answer(before, begin)

    def _backends_of(self, roles: Sequence[str]) -> list[Backend]:
        return [self._backends[Role(role)] for role in roles]

    def _answer(self, before: DeviceState, begin: float) -> Message:
        self._synchronize()
        after = self._device_state()
        return Message({}, [changed(before, after, time.perf_counter() - begin).SerializeToString()])

    def _device_state(self) -> DeviceState:
        return_free_memory(self._device)  # or it would not be free for others
        if self._device.type == "cuda":
            resident = torch.cuda.memory_reserved(self._device)
        else:
            resident = sum(backend.offloader.device_bytes() for backend in self._backends.values())
        host = sum(backend.offloader.host_bytes() for backend in self._backends.values())
        return device_state(self._device, resident_bytes=resident, host_bytes=host)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def reserve_workspaces(device: torch.device) -> None:
    """Lets cuBLAS take its workspaces for forward and backward, as long as torch has no free memory of models.

    Otherwise torch would cut them from the memory of a large tensor that was freed, such as an embedding while a model
    is built, and could not give the rest of it back to the GPU for as long as the process runs.
    """
    if device.type != "cuda":
        return
    for dtype in (torch.float32, torch.bfloat16):
        weight_KN = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
        bias_N = torch.zeros(16, device=device, dtype=dtype, requires_grad=True)
        torch.addmm(bias_N, weight_KN, weight_KN).sum().backward()


def return_free_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
