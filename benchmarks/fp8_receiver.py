"""Publishes weights inside an engine's worker, without a trainer; `benchmarks.fp8` uses it as vLLM's worker extension.

A version of the weights is the model directory's, times a factor: every number of it is another one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import safe_open

from services.common.weights.buckets import pack
from services.common.weights.plan import Bucket, Plan
from services.rollout.receiver import WeightReceiver

_BUCKET_BYTES = 512 << 20


class Published(TypedDict):
    """What a worker answers to a publication."""

    digest: str
    quantized_digest: str
    duration_s: float
    is_direct: bool
    problem: str


class Wire:
    """Takes the place of a weight group: every bucket arrives at once."""

    def __init__(self, flats: Sequence[torch.Tensor], factor: float):
        self._flats, self._factor = flats, factor

    def agrees(self, values: object) -> bool:
        return False

    def receive(self, buckets: Sequence[Bucket], *, in_place: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yields each bucket in new memory."""
        for bucket, flat in zip(buckets, self._flats, strict=True):
            yield bucket, (flat.view(torch.bfloat16) * self._factor).view(torch.uint8)

    def free_buffers(self) -> bool:
        return True

    def acknowledge(self, version: int, digest: str) -> None: ...

    def kill(self) -> None: ...

    def abort(self) -> None: ...


class LocalReceiver(WeightReceiver):
    """Receives what it has read from a model directory itself."""

    _lockstep_flats: Sequence[torch.Tensor] = ()

    def lockstep_read(self, directory: str) -> int:
        """Reads the weights to the worker's device. Returns their bytes."""
        weights = [
            (name, tensor) for path in sorted(Path(directory).glob("*.safetensors")) for name, tensor in _in(path)
        ]
        self._lockstep_set_plan(Plan.of(weights, bucket_bytes=_BUCKET_BYTES).message.SerializeToString())
        on_device = ((name, tensor.to(self.device)) for name, tensor in weights)
        self._lockstep_flats = [flat for _, flat in pack(self._lockstep_plan, on_device, self.device)]
        return sum(flat.numel() for flat in self._lockstep_flats)

    def lockstep_publish(self, factor: float) -> Published:
        """Receives all weights, times `factor`. The plan must have been read."""
        group: Any = Wire(self._lockstep_flats, factor)
        self._lockstep_group = group
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        answer: Any = self.lockstep_receive(0)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        loading = self._lockstep_loading
        return Published(
            digest=answer["digest"],
            quantized_digest=answer["quantized_digest"],
            duration_s=answer["duration_s"],
            is_direct=loading.reads_in_place,
            problem=loading._problem,
        )


def _in(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 it is no mapping
            yield name, file.get_tensor(name).bfloat16()  # as they are, on a GPU
