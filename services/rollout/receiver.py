"""The engine-worker end of a publication: a mixin that vLLM adds to its Worker class (worker_extension_cls).

vLLM refuses a mixin whose attributes collide with the Worker's, hence the prefix. Everything here runs inside the
engine's processes; the calls arrive through `collective_rpc` with plain values only.
"""

import time
from typing import Any

import torch
from lockstep.types.v1 import types_pb2
from vllm.config import set_current_vllm_config

from services.common.errors import LockstepError
from services.common.weights.digest import WeightDigest
from services.common.weights.group import WeightGroup
from services.common.weights.plan import Plan
from services.rollout.loading import NUM_BUFFERS, Arrivals, Loading

# Broadcasts posted ahead of the one that is being loaded.
_DEPTH = NUM_BUFFERS - 1


class WeightReceiver:
    """Joins an epoch, receives, loads and hashes. vLLM's Worker brings model_runner, vllm_config, device and rank."""

    def lockstep_join(self, group: bytes, plan: bytes, base_rank: int) -> dict[str, Any]:
        """Enters the epoch; answers with the plan's digest as built here, or with the error."""
        self.lockstep_leave()
        try:
            self._lockstep_set_plan(plan)
            self._lockstep_group = WeightGroup(
                types_pb2.WeightGroup.FromString(group), rank=base_rank + self._lockstep_rank(), device=self.device
            )
        except LockstepError as error:
            return {"error": error.message}
        return {"plan_digest": self._lockstep_plan.digest}

    def lockstep_receive(self, version: int) -> dict[str, Any]:
        """Receives one publication into the live model; answers with its digest, or with the error.

        An error is a value, not an exception: vLLM would report the first failing worker only.
        """
        loading, group, begin = self._lockstep_loading, self._lockstep_group, time.perf_counter()
        timing = {"wait_s": 0.0}
        digest = WeightDigest(self._lockstep_plan.digest, self.device)
        try:
            with torch.no_grad(), torch.device(self.device), set_current_vllm_config(self.vllm_config):
                loading.load(self._lockstep_arrivals(digest, timing, loading.buffers))
            content = digest.hexdigest()
            group.acknowledge(version, content)
        except Exception as error:  # noqa: BLE001 whatever it was, the engine must stay reloadable
            loading.abort()
            group.kill()
            self.lockstep_leave()
            return {"error": f"{type(error).__name__}: {error}"}
        num_bytes, duration_s = self._lockstep_plan.num_bytes, time.perf_counter() - begin
        return {"digest": content, "num_bytes": num_bytes, "duration_s": duration_s, **timing}

    def lockstep_leave(self) -> None:
        """Leaves the epoch, if any."""
        group = getattr(self, "_lockstep_group", None)
        self._lockstep_group = None
        if group is not None:
            group.abort()

    def _lockstep_rank(self) -> int:
        parallel = self.vllm_config.parallel_config
        return getattr(parallel, "data_parallel_index", 0) * parallel.world_size + self.rank

    def _lockstep_set_plan(self, message: bytes) -> None:
        """What was learnt about the engine's memory holds as long as the plan is the same."""
        if getattr(self, "_lockstep_plan_message", None) != message:
            self._lockstep_plan = Plan(types_pb2.WeightPlan.FromString(message))
            model = self.model_runner.get_model()
            self._lockstep_loading = Loading(model, self.model_config, self._lockstep_plan, self.device)
            self._lockstep_plan_message = message

    def _lockstep_arrivals(
        self, digest: WeightDigest, timing: dict[str, float], buffers: list[torch.Tensor] | None
    ) -> Arrivals:
        group, buckets = self._lockstep_group, self._lockstep_plan.buckets

        def post(index: int) -> tuple[torch.Tensor, Any]:
            size = buckets[index].num_bytes
            # Without buffers a new one each time: vLLM keeps views of it until the layer is complete.
            flat = (
                buffers[index % NUM_BUFFERS][:size]
                if buffers
                else torch.empty(size, dtype=torch.uint8, device=self.device)
            )
            return flat, group.broadcast(flat)

        posted = [post(index) for index in range(min(_DEPTH, len(buckets)))]
        for index, bucket in enumerate(buckets):
            flat, work = posted.pop(0)
            begin = time.perf_counter()
            group.wait(work)
            timing["wait_s"] += time.perf_counter() - begin
            if index + _DEPTH < len(buckets):
                posted.append(post(index + _DEPTH))
            digest.update(flat, start=bucket.start)
            yield index, bucket, flat
