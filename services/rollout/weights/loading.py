"""Loads received buckets into the engine: first by a recorded reload, then by a checked one, then by direct copies."""

import logging
from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import ModelConfig

from services.common.weights.buckets import unpack
from services.common.weights.digest import WeightDigest
from services.common.weights.plan import Bucket, Plan
from services.rollout.compat.vllm.reload import abort_reload, not_plain, reload_weights
from services.rollout.weights.direct import DirectMap, Recorder

log = logging.getLogger(__name__)

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
    def reads_in_place(self) -> bool:
        """Returns whether a bucket is read at once. Otherwise each needs new memory, because vLLM keeps parts of it."""
        return self._map is not None and self._is_checked

    def forget_buffers(self) -> None:
        """Keeps nothing of the memory that buckets arrived in."""
        if self._map:
            self._map.forget_buffers()

    def load(self, arrivals: Arrivals) -> None:
        """Loads one publication and waits for the device."""
        if self._map and self._is_checked:
            for index, _, flat in arrivals:
                self._map.load(index, flat)
        elif self._map:
            self._reload_and_check(self._map, arrivals)
        elif self._problem:
            self._reload(arrivals)
        else:
            self._reload_and_watch(arrivals)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

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
        self._map = DirectMap(recorder.copies, len(self._plan.buckets))

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
