"""The engine-worker end of a publication: a mixin that vLLM adds to its Worker class (worker_extension_cls).

vLLM refuses a mixin whose attributes collide with the Worker's, hence the prefix. Everything here runs inside the
engine's processes; the calls arrive through `collective_rpc` with plain values only.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from lockstep.types.v1 import types_pb2
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from services.common.errors import LockstepError
from services.common.weights.digest import WeightDigest
from services.common.weights.group import WeightGroup
from services.common.weights.plan import Plan, unpack

# Broadcasts posted ahead of the one that is being loaded.
_DEPTH = 2


class WeightReceiver:
    """Joins an epoch, receives, loads and hashes. vLLM's Worker brings model_runner, vllm_config, device and rank."""

    def lockstep_join(self, group: bytes, plan: bytes, base_rank: int) -> dict[str, Any]:
        """Enters the epoch; answers with the plan's digest as built here, or with the error."""
        self.lockstep_leave()
        try:
            self._lockstep_plan = Plan(types_pb2.WeightPlan.FromString(plan))
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
        model, group, begin = self.model_runner.get_model(), self._lockstep_group, time.perf_counter()
        timing = {"wait_s": 0.0}
        digest = WeightDigest(self._lockstep_plan.digest, self.device)
        try:
            with torch.no_grad(), torch.device(self.device), set_current_vllm_config(self.vllm_config):
                _load(model, self.model_config, self._lockstep_stream(digest, timing))
            content = digest.hexdigest()
            group.acknowledge(version, content)
        except Exception as error:  # noqa: BLE001 whatever it was, the engine must stay reloadable
            _abort_reload(model)
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

    def _lockstep_stream(self, digest: WeightDigest, timing: dict[str, float]) -> Iterator[tuple[str, torch.Tensor]]:
        group, buckets = self._lockstep_group, self._lockstep_plan.buckets

        def post(index: int) -> tuple[torch.Tensor, Any]:
            # A new buffer each time: vLLM keeps views of it until the layer is complete.
            flat = torch.empty(buckets[index].num_bytes, dtype=torch.uint8, device=self.device)
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
            yield from unpack(bucket, flat)


def _load(model: nn.Module, model_config: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        _unpack_experts_on_cpu(model)
    initialize_layerwise_reload(model)
    model.load_weights(weights)
    finalize_layerwise_reload(model, model_config)
    if on_cpu:
        _repack_tied_head_on_cpu(model)
    else:
        torch.accelerator.synchronize()


def _abort_reload(model: nn.Module) -> None:
    """Undoes a reload that ended half way; vLLM would mix its pieces into the next one."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _unpack_experts_on_cpu(model: nn.Module) -> None:
    """vLLM's CPU MoE packs its weights only while it has no kernel yet, so a reload would leave them unpacked."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_head_on_cpu(model: nn.Module) -> None:
    """A tied lm_head keeps a packed copy of its own on CPU that the reload does not see."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
