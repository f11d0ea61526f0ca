"""Tests ReleaseMemory and AcquireMemory on a GPU with the shape of Qwen3-0.6B: other processes can use freed memory.

With `-s` it shows the bytes and seconds of each call. The first release of a part also pins its host memory, and the
first release after an update pins that of the optimizer's state; the others only copy.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lockstep.types.v1.types_pb2 import DeviceMemory

from services.common.errors import Overloaded, Reason
from services.trainer.backend import Part, Role
from services.trainer.ranks.worker import Worker
from tests.support import make_model, raises
from tests.trainer.fsdp_harness import Harness, samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KIND = "qwen3-0.6b"
NUM_WEIGHTS = 596_049_920
GIB = 1 << 30
# torch gives back whole segments. One stays if it has a tensor that does not leave, such as a library's workspace.
KEPT_BYTES = GIB // 2
MEGATRON = {"strategy": "megatron", "compute_dtype": "bfloat16"}
# Each case: changes of the config, and bytes for each weight, first of the parameters, then of the optimizer, which has
# the moments, and float32 weights where the parameters are bfloat16.
CASES: dict[str, tuple[dict[str, Any], float, float]] = {
    "fsdp": ({"compute_dtype": "bfloat16"}, 4, 8),
    "megatron": (MEGATRON, 2, 12 + 4),  # and the buffer for gradients
    "megatron-lora": (MEGATRON | {"lora": {"rank": 16, "alpha": 32.0}}, 2, 0),
}


class GpuHarness(Harness):
    def __init__(self, models: Path):
        super().__init__(dist.HashStore(), 0, 1, models)
        self.worker = Worker(dist.HashStore(), 0, 1, torch.device("cuda", 0))

    def release(self, *parts: Part) -> DeviceMemory:
        return show("release", parts, self.worker.release_memory(model_parts=parts, roles=[Role.POLICY]))

    def acquire(self, *parts: Part) -> DeviceMemory:
        return show("acquire", parts, self.worker.acquire_memory(model_parts=parts, roles=[Role.POLICY]))

    def contents(self) -> list[tuple[str, int, int]]:
        """Returns group, bytes and checksum of every storage that the backend can offload, except gradients."""
        offloader: Any = self.backend.offloader
        names = [name for name in offloader._groups if name != "grads"]
        return [
            (name, storage.nbytes(), int(_words(storage).sum()))
            for name in names
            for storage in offloader._storages(name)
        ]


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat[: flat.numel() // 2 * 2].view(torch.int16).long()


def show(what: str, parts: tuple[Part, ...], answer: Any) -> DeviceMemory:
    memory = DeviceMemory.FromString(answer.frames[0])
    moved = memory.freed_bytes + memory.taken_bytes
    sys.stdout.write(
        f"\n{what} {'+'.join(parts)}: {moved / GIB:.2f} GiB in {memory.duration_s:.3f} s "
        f"({moved / GIB / memory.duration_s:.1f} GiB/s), resident {memory.resident_bytes / GIB:.2f} "
        f"({torch.cuda.memory_allocated() / GIB:.2f} in tensors), "
        f"free {memory.device_free_bytes / GIB:.2f} of {memory.device_total_bytes / GIB:.2f} GiB\n"
    )
    return memory


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuHarness]:
    models = tmp_path_factory.mktemp("models")
    make_model(models / KIND, KIND)
    harness = GpuHarness(models)
    yield harness
    harness.worker.close()


@pytest.mark.parametrize("name", CASES)
def test_memory_leaves_the_gpu_and_comes_back_bit_for_bit(harness: GpuHarness, name: str):
    changes, parameter_bytes, optimizer_bytes = CASES[name]
    harness.open(KIND, changes)
    harness.train(samples(0), version=0)
    free_before = torch.cuda.mem_get_info()[0]
    for version in range(1, 4):
        kept = harness.contents()
        optimizer = harness.release(Part.OPTIMIZER)
        assert optimizer.freed_bytes >= optimizer_bytes * NUM_WEIGHTS - KEPT_BYTES
        parameters = harness.release(Part.PARAMETERS)
        assert parameters.freed_bytes >= parameter_bytes * NUM_WEIGHTS - KEPT_BYTES
        assert parameters.resident_bytes < KEPT_BYTES
        assert parameters.device_uuid.startswith("GPU-")
        assert parameters.device_free_bytes >= free_before + 0.9 * (parameters.freed_bytes)
        assert harness.release(*Part).freed_bytes == 0
        taken = harness.acquire(*Part)
        assert taken.taken_bytes >= parameters.freed_bytes + optimizer.freed_bytes - KEPT_BYTES
        assert harness.acquire(*Part).taken_bytes == 0
        assert harness.contents() == kept
        metrics = harness.train(samples(version), version=version)
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", ["fsdp", "megatron"])
def test_what_does_not_fit_is_refused_with_the_numbers_and_can_be_repeated(harness: GpuHarness, name: str):
    harness.open(KIND, CASES[name][0])
    harness.train(samples(0), version=0)
    kept = harness.contents()
    released = harness.release(*Part)
    other = torch.empty(released.device_free_bytes - 2 * GIB, dtype=torch.uint8, device="cuda")
    with raises(Overloaded, reason=Reason.OUT_OF_MEMORY) as raised:
        harness.acquire(*Part)
    assert int(raised.value.metadata["needed_bytes"]) > int(raised.value.metadata["free_bytes"])
    del other
    harness.acquire(*Part)
    assert harness.contents() == kept
    harness.train(samples(1), version=1)
