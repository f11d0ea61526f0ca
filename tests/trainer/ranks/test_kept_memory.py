"""Tests which parts a rank moves to host memory if its device may already have enough free. The device is faked."""

from collections.abc import Collection
from typing import Any

import pytest
import torch

from services.trainer.backend import Part, Role
from services.trainer.ranks.memory import MemoryCommands

SIZES = {Part.OPTIMIZER: 40, Part.PARAMETERS: 10}


class FakeBackend:
    def __init__(self) -> None:
        self.released: list[Part] = []
        self.offloader = self

    def release(self, parts: Collection[Part]) -> None:
        self.released += parts

    def device_bytes(self) -> int:
        return 50 - self.host_bytes()

    def host_bytes(self) -> int:
        return sum(SIZES[part] for part in self.released)


class Rank(MemoryCommands):
    def __init__(self, backend: Any):
        self._device, self._backends = torch.device("cpu"), {Role.POLICY: backend}


@pytest.mark.parametrize(
    ("least_free_bytes", "released"),
    [(0, [Part.OPTIMIZER, Part.PARAMETERS]), (30, []), (31, [Part.OPTIMIZER]), (70, [Part.OPTIMIZER]), (71, [*Part])],
)
def test_parts_leave_until_enough_is_free(
    monkeypatch: pytest.MonkeyPatch, least_free_bytes: int, released: list[Part]
) -> None:
    backend = FakeBackend()
    free = lambda device, *, resident_bytes, host_bytes: {  # noqa: E731
        "device_uuid": "GPU-1",
        "resident_bytes": resident_bytes,
        "device_total_bytes": 100,
        "device_free_bytes": 30 + host_bytes,
        "host_bytes": host_bytes,
    }
    monkeypatch.setattr("services.trainer.ranks.memory.device_state", free)
    parts = [Part.OPTIMIZER, Part.PARAMETERS]
    Rank(backend).release_memory(model_parts=parts, roles=[Role.POLICY], least_free_bytes=least_free_bytes)
    assert sorted(backend.released) == sorted(released)


def test_a_device_that_is_not_measured_keeps_nothing() -> None:
    backend = FakeBackend()
    Rank(backend).release_memory(model_parts=list(Part), roles=[Role.POLICY], least_free_bytes=1)
    assert sorted(backend.released) == sorted(Part)
