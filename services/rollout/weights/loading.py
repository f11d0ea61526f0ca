"""Loads received buckets into the engine: first by a recorded reload, then by a checked one, then by direct copies."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from vllm.config import ModelConfig

from services.common.weights.digest import WeightDigest
from services.common.weights.plan import Bucket, Plan, unpack
from services.rollout.compat.vllm.reload import abort_reload, not_plain, reload_weights
from services.rollout.weights.direct import DirectMap, Recorder

log = logging.getLogger(__name__)

# Buckets in memory at the same time: two being received and one being loaded.
NUM_BUFFERS = 3

# (index of the bucket, bucket, its bytes), in the order of arrival.
Arrivals = Iterator[tuple[int, Bucket, torch.Tensor]]


class Loading:
    """Loads publications of one plan into one engine worker. Call `load` once for every publication."""

    def __init__(self, model: nn.Module, model_config: ModelConfig, plan: Plan, device: torch.device):
        self._model, self._model_config, self._device = model, model_config, device
        self._plan = plan
        self._map: DirectMap | None = None
        self._is_checked = False
        self._problem = not_plain(model)

    @property
    def buffers(self) -> Sequence[torch.Tensor] | None:
        """Returns the buffers to receive into (bucket i into buffer i % n), or None if each bucket needs new memory."""
        return self._map.buffers if self._map and self._is_checked else None

    def load(self, arrivals: Arrivals) -> None:
        """Loads one publication and waits for the device."""
        if self._map and self._is_checked:
            for index, _, _ in arrivals:
                self._map.load(index)
        elif self._map:
            self._reload_and_check(self._map, arrivals)
        elif self._problem:
            self._reload(arrivals)
        else:
            self._reload_and_watch(arrivals)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def free_buffers(self) -> None:
        """Frees the buffers' memory, for the time in which the engine sleeps."""
        for buffer in self._map.buffers if self._map else ():
            buffer.untyped_storage().resize_(0)

    def take_buffers(self) -> None:
        """Takes the memory that `free_buffers` freed, with unspecified content."""
        for buffer in self._map.buffers if self._map else ():
            buffer.untyped_storage().resize_(buffer.nbytes)

    def abort(self) -> None:
        """Makes the engine reloadable again after an incomplete publication."""
        if not self._is_checked:
            abort_reload(self._model)
            self._map = None

    def _reload(self, arrivals: Arrivals, recorder: Recorder | None = None) -> None:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for index, bucket, flat in arrivals:
                if recorder is not None:
                    recorder.add_bucket(index, flat)
                yield from unpack(bucket, flat)

        reload_weights(self._model, self._model_config, weights())

    def _reload_and_watch(self, arrivals: Arrivals) -> None:
        recorder = Recorder([*self._model.parameters(), *self._model.buffers()])
        with recorder:
            self._reload(arrivals, recorder)
        if recorder.copies is None:
            self._give_up(recorder.problem)
            return
        size = max(bucket.num_bytes for bucket in self._plan.buckets)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)]
        self._map = DirectMap(recorder.copies, len(self._plan.buckets), buffers)

    def _reload_and_check(self, direct: DirectMap, arrivals: Arrivals) -> None:
        received = WeightDigest("", self._device)

        def digested() -> Arrivals:
            for index, bucket, flat in arrivals:
                direct.digest_received(received, index, flat, bucket.start)
                yield index, bucket, flat

        self._reload(digested())
        loaded = WeightDigest("", self._device)
        for index, bucket in enumerate(self._plan.buckets):
            direct.digest_loaded(loaded, index, bucket.start)
        self._is_checked = loaded.hexdigest() == received.hexdigest()
        if not self._is_checked:
            self._give_up("the reload wrote other bytes than the recorded copies would")

    def _give_up(self, problem: str) -> None:
        self._problem, self._map = problem, None
        log.info("publications use vLLM's slower reload: %s", problem)
