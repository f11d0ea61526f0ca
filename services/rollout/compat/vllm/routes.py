"""Returns routes: the experts that an engine's layers chose for each token of a sample but the last.

vLLM 0.26 to 0.30 return them with `enable_return_routed_experts` and the V1 model runner. That is what runs on GPU; it
was not run yet. Later versions need Model Runner V2 for it, which runs on GPU only. On CPU the routers are hooked
instead, as vLLM's own recorder does it. Seen with vLLM 0.32.0 on CPU.

The hook writes routes by slot: the place of a token in the KV cache. A token in the prefix cache thus keeps the routes
that it was computed with. The slots are in a file that the engine's first worker and its scheduler map into their
memory, since the two may be different processes.
"""

import functools
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from packaging.specifiers import SpecifierSet
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from services.common.batches.routes import RouteShape, route_shape
from services.common.compat.versions import require_version
from services.rollout.compat.vllm.worker import WorkerExtension, model_of

_ON_GPU, _ON_CPU = SpecifierSet(">=0.26,<0.31"), SpecifierSet(">=0.32,<0.33")
_KEY, _FILE = "lockstep_routes", "routes.slots"


def returning_routes(arguments: Mapping[str, Any], *, is_gpu: bool) -> dict[str, Any] | None:
    """Returns `arguments` of an engine that returns routes, or None if this vLLM cannot with these arguments."""
    version = require_version("vllm")
    if arguments.get("pipeline_parallel_size", 1) > 1 or arguments.get("data_parallel_size", 1) > 1:
        return None
    if is_gpu:
        return {**arguments, "enable_return_routed_experts": True} if version in _ON_GPU else None
    if version not in _ON_CPU or not arguments.get("enforce_eager"):  # a compiled router would not call the hook
        return None
    return {**arguments, "additional_config": {**arguments.get("additional_config", {}), _KEY: True}}


def keep_in_one_frame() -> None:
    """Makes engines that start from here on send routes inside of their messages, and not as frames of their own.

    Reason: vLLM 0.26 overwrites the memory of a message of several frames that ZeroMQ has not sent yet.
    """
    os.environ["VLLM_MSGPACK_ZERO_COPY_THRESHOLD"] = str(1 << 40)


def are_hooked(vllm_config: VllmConfig) -> bool:
    """Returns whether the engine was started with the arguments of `returning_routes` on CPU."""
    return isinstance(vllm_config.additional_config, dict) and _KEY in vllm_config.additional_config


class _Recorder:
    """Writes the experts that each layer chooses into the slots of the tokens. vLLM's binding calls `capture` only."""

    def __init__(self, slots_SLK: np.ndarray):
        self._slots_SLK = slots_SLK

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Takes the experts [rows, top_k] of the step that runs."""
        mapping = get_forward_context().slot_mapping
        if not isinstance(mapping, dict) or not mapping:
            return  # a run without requests
        slots = next(iter(mapping.values()))[: len(topk_ids)].numpy()
        is_token = slots >= 0  # the others are padding
        self._slots_SLK[slots[is_token], layer_id] = topk_ids.numpy()[is_token]


def record_routes(worker: WorkerExtension) -> None:
    """Hooks the routers of a worker's model, if the engine was started for it."""
    if not are_hooked(worker.vllm_config) or worker.rank:
        return
    # With vLLM 0.26 this module has another recorder and no such function.
    capturer: Any = import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
    bind: Callable[..., None] = capturer.bind_routed_experts_capturer
    cache = worker.vllm_config.cache_config
    assert cache.num_gpu_blocks, "the engine has allocated its KV cache"
    shape = _shape(worker.vllm_config)
    size = (cache.num_gpu_blocks * cache.block_size, shape.num_layers, shape.top_k)
    bind(model_of(worker), _Recorder(np.memmap(_path(worker.vllm_config), shape.dtype, "w+", shape=size)))


_Base = Scheduler if TYPE_CHECKING else object


class ReturnsRoutes(_Base):
    """Mixin for vLLM's schedulers: adds the routes of a sample to its last output. It comes first among the bases."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._routes: dict[str, np.ndarray] = {}

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Returns what to send to each client."""
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for answer in answers.values():
            for output in answer.outputs:
                if output.finish_reason is not None:
                    output.routed_experts = self._routes.get(output.request_id)
        self._routes.clear()
        return answers

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Reads the routes of a request that has ended, before its slots can be given to another."""
        (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
        slots = np.add.outer(np.array(blocks) * self.block_size, np.arange(self.block_size)).reshape(-1)
        self._routes[request.request_id] = self._slots_SLK[slots[: request.num_tokens - 1]]
        return super()._free_request(request, *args, **kwargs)

    @functools.cached_property  # the first worker has made the file by the time that a request ends
    def _slots_SLK(self) -> np.ndarray:
        shape = _shape(self.vllm_config)
        flat = np.memmap(_path(self.vllm_config), shape.dtype, "r")
        return np.asarray(flat).reshape(-1, shape.num_layers, shape.top_k)


def _path(vllm_config: VllmConfig) -> Path:
    return Path(vllm_config.model_config.model) / _FILE


def _shape(vllm_config: VllmConfig) -> RouteShape:
    shape = route_shape((Path(vllm_config.model_config.model) / "config.json").read_bytes())
    assert shape is not None, "routes are asked for only of such a model"
    return shape
