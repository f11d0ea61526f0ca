"""Returns what an engine has chosen for each token of a sample: sampling masks and routed experts.

A sampling mask is the set of tokens that top-k, top-p and min-p have kept. vLLM 0.32 returns them with
`return_sampling_mask` and Model Runner V2, which runs on GPU only and was not run yet; such an engine refuses greedy
requests. On CPU, and with vLLM 0.26 to 0.30 on GPU, the sampler of the V1 model runner is hooked instead (client.py
chooses that runner). The hook reads the log-probabilities that the sampler returns, which are -inf where a token was
not kept. Masks reach the scheduler with the tokens of their step, and the service with the sample's last output.

Routed experts are those that the layers chose for each token but the last. vLLM 0.26 to 0.30 return them with
`enable_return_routed_experts` and the V1 model runner. That is what runs on GPU. Later versions need Model Runner V2
for it, which runs on GPU only. On CPU the routers are hooked instead, as vLLM's own recorder does it. The hook writes
experts by slot: the place of a token in the KV cache. A token in the prefix cache thus keeps the experts that it was
computed with. The slots are in a file that the engine's first worker and its scheduler map into their memory, since the
two may be different processes.

Seen with vLLM 0.32.0 on CPU and, both with the V1 model runner, 0.26.0 on a GPU.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from packaging.specifiers import SpecifierSet
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from services.common.batches import allows_sampled, decode_sampling_masks, encode_sampling_masks
from services.common.compat import require_version
from services.common.errors import InternalError, InvalidInput
from services.common.routed_experts import RoutedExpertsShape, routed_experts_shape
from services.rollout.compat.worker import WorkerExtension, model_of

Value = TypeVar("Value")
EngineArguments = dict[str, Any]
"""vLLM's engine arguments: AsyncEngineArgs by name, of which `rollout.engine` may set any."""

_V1_RUNNER_ON_GPU, _SEEN = SpecifierSet(">=0.26,<0.31"), SpecifierSet(">=0.32,<0.33")
# The keys of `additional_config` with which an engine returns something, and of masks in vLLM's answers.
MASKS, EXPERTS = "lockstep_masks", "lockstep_experts"
ASKS = {MASKS: True}
"""The `extra_args` of a request whose sampling masks are returned."""


def returning_masks(arguments: EngineArguments, *, is_gpu: bool) -> EngineArguments:
    """Returns `arguments` of an engine that returns the sampling masks of requests that ask.

    Raises:
        InvalidInput: This vLLM cannot with these arguments.
    """
    version = require_version("vllm")
    is_native = is_gpu and version in _SEEN
    if _is_split(arguments) or not (is_native or version in (_V1_RUNNER_ON_GPU if is_gpu else _SEEN)):
        why = "with pipeline_parallel_size or data_parallel_size above 1" if _is_split(arguments) else "on this device"
        raise refusal(f"vLLM {version} cannot return {why} which tokens it has kept")
    marked = _with_option(arguments, MASKS)
    return marked | {"return_sampling_mask": True} if is_native else marked


def refusal(why: str) -> InvalidInput:
    """Returns the error of an engine that cannot return sampling masks."""
    return InvalidInput(
        f"rollout.sampling.top_k: {why}, which training on truncated samples needs; set top_k to 0, top_p to 1 and "
        "min_p to 0",
        field="rollout.sampling.top_k",
    )


def returning_experts(arguments: EngineArguments, *, is_gpu: bool) -> EngineArguments | None:
    """Returns `arguments` of an engine that returns routed experts; None if this vLLM cannot with these arguments."""
    version = require_version("vllm")
    if _is_split(arguments):
        return None
    if is_gpu and version in _V1_RUNNER_ON_GPU:
        # On Blackwell vLLM prefers a kernel that routes by itself, from which it returns no experts but zeros.
        return {"moe_backend": "triton", **arguments, "enable_return_routed_experts": True}
    if is_gpu:
        return None
    can_hook = version in _SEEN and arguments.get("enforce_eager")  # a compiled router would not call the hook
    return _with_option(arguments, EXPERTS) if can_hook else None


def _is_split(arguments: EngineArguments) -> bool:
    return arguments.get("pipeline_parallel_size", 1) > 1 or arguments.get("data_parallel_size", 1) > 1


def _with_option(arguments: EngineArguments, key: str) -> EngineArguments:
    return {**arguments, "additional_config": {**arguments.get("additional_config", {}), key: True}}


def is_marked(vllm_config: VllmConfig, key: str) -> bool:
    """Returns whether the engine was started to return MASKS, or EXPERTS by hooked routers."""
    return isinstance(vllm_config.additional_config, dict) and key in vllm_config.additional_config


class SchedulerMixin(Scheduler if TYPE_CHECKING else object):
    """Mixin for vLLM's schedulers that keeps tables by request; it must come before the scheduler among the bases."""

    @functools.cached_property
    def _tables(self) -> list[dict[str, Any]]:
        return []

    def new_table(self) -> dict[str, Any]:
        """Returns a table by request id, which forgets aborted requests."""
        self._tables.append(table := {})
        return table

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        aborted = super().finish_requests(request_ids, finished_status)
        for request in aborted:
            for table in self._tables:
                table.pop(request.request_id, None)
        return aborted


def last_outputs(answers: Mapping[int, EngineCoreOutputs]) -> Iterator[EngineCoreOutput]:
    """Yields the outputs of a step that are the last of their samples."""
    for answer in answers.values():
        yield from (output for output in answer.outputs if output.finish_reason is not None)


# Values travel in a field that only KV connectors use, which Lockstep has none of. Seen with vLLM 0.26.0 and 0.32.0.
def attach(output: EngineCoreOutput, key: str, value: object) -> None:
    """Adds a value, of types that MessagePack has, to a sample's last output."""
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), key: value}


def attached(output: RequestOutput, key: str, default: Value) -> Value:
    """Returns what was attached, or `default` if nothing was."""
    return (output.kv_transfer_params or {}).get(key, default)


class _MaskRecorder:
    """Adds the sampling masks of a step to what the model runner returns for it."""

    def __init__(self, runner: Any):
        self._runner, self._sample, self._sample_tokens = runner, runner.sampler.sample, runner.sample_tokens
        self._masks: dict[str, np.ndarray] = {}
        runner.sampler.sample, runner.sample_tokens = self.sample, self.sample_tokens

    def sample(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples as vLLM does; takes note of the tokens that could be sampled."""
        sampled_B, logprobs_BV = self._sample(*args, **kwargs)
        requests = self._runner.input_batch.req_ids
        states = [self._runner.requests[request] for request in requests]
        asking = [row for row, state in enumerate(states) if _wants_masks(state.sampling_params)]
        if asking:
            assert logprobs_BV is not None, "requests ask for log-probabilities, and returning_masks requires the mode"
            if len(asking) < len(requests):
                is_allowed = logprobs_BV[torch.tensor(asking, device=logprobs_BV.device)] > -torch.inf
            else:  # all ask, so there is nothing to copy
                is_allowed = logprobs_BV[: len(asking)] > -torch.inf
            allowed, ends = is_allowed.nonzero()[:, 1].cpu().numpy(), is_allowed.sum(1).cumsum(0).tolist()
            spans = zip(asking, [0, *ends[:-1]], ends, strict=True)
            self._masks = {requests[row]: allowed[begin:end] for row, begin, end in spans}
        return sampled_B, logprobs_BV

    def sample_tokens(self, *args: object, **kwargs: object) -> object:
        """Does what vLLM does, and adds the masks to its answer, or to the answer that is completed later."""
        self._masks = {}
        output = self._sample_tokens(*args, **kwargs)
        if self._masks:
            setattr(getattr(output, "_model_runner_output", output), MASKS, self._masks)
        return output


def _wants_masks(sampling: SamplingParams) -> bool:
    return MASKS in (sampling.extra_args or {})


def record_masks(worker: WorkerExtension) -> bool:
    """Hooks the worker's sampler, unless vLLM returns masks itself. Returns whether they will be returned."""
    from vllm.v1.sample.sampler import Sampler  # late: only a worker needs it

    if getattr(worker.model_config, "return_sampling_mask", False):
        return True
    if not isinstance(getattr(worker.model_runner, "sampler", None), Sampler):
        return False  # another model runner than V1
    _MaskRecorder(worker.model_runner)
    return True


class ReturnsMasks(SchedulerMixin):
    """Adds the sampling masks of a sample to its last output. It comes last among the mixins, because it reads every
    output."""

    @functools.cached_property
    def _masks(self) -> dict[str, list[np.ndarray | Sequence[int]]]:
        return self.new_table()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        answers = super().update_from_output(scheduler_output, model_runner_output)
        masks: Mapping[str, np.ndarray] = getattr(model_runner_output, MASKS, {})
        for answer in answers.values():
            for output in answer.outputs:
                self._add(output, masks)
        return answers

    def _add(self, output: EngineCoreOutput, masks: Mapping[str, np.ndarray]) -> None:
        native = getattr(output, "new_sampling_mask", None)
        if native is not None:
            self._masks.setdefault(output.request_id, []).extend(native.to_nested_list())
            output.new_sampling_mask = None
        elif output.new_token_ids and output.request_id in masks:
            self._masks.setdefault(output.request_id, []).append(masks[output.request_id])
        if output.finish_reason is not None and (collected := self._masks.pop(output.request_id, None)):
            attach(output, MASKS, encode_sampling_masks(collected))


def masks_of(output: RequestOutput) -> bytes:
    """Returns the sampling masks of the sample that `output` has finished.

    Raises:
        InternalError: vLLM returned none, those of another number of tokens, or masks without the sampled tokens.
    """
    tokens = np.array(output.outputs[0].token_ids)
    data = attached(output, MASKS, b"")
    try:
        counts, allowed = decode_sampling_masks(data, len(tokens))
    except ValueError as error:
        raise InternalError(f"vLLM returned no sampling masks of a sample: {error}") from error
    if num_missing := np.count_nonzero(~allows_sampled(tokens, counts, allowed)):
        raise InternalError(f"vLLM returned sampling masks without {num_missing} of {len(tokens)} sampled tokens")
    return data


class _ExpertRecorder:
    """Writes the experts that each layer chooses into the slots of the tokens. vLLM's binding calls `capture` only."""

    def __init__(self, slots_SLK: np.ndarray, layer_name: str):
        """`layer_name`: an attention layer of `_kept_group`."""
        self._slots_SLK, self._layer_name = slots_SLK, layer_name

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Takes the experts [rows, top_k] of the step that runs."""
        mapping = get_forward_context().slot_mapping
        if not isinstance(mapping, dict) or not mapping:
            return  # a run without requests
        slots = mapping[self._layer_name][: len(topk_ids)].numpy()
        is_token = slots >= 0  # the others are padding
        self._slots_SLK[slots[is_token], layer_id] = topk_ids.numpy()[is_token]


def record_experts(worker: WorkerExtension) -> None:
    """Hooks the routers of a worker's model, if the engine was started for it."""
    if not is_marked(worker.vllm_config, EXPERTS) or worker.rank:
        return
    # With vLLM 0.26 this module has another recorder and no such function.
    capturer = import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
    bind: Callable[..., None] = capturer.bind_routed_experts_capturer
    cache = worker.vllm_config.cache_config
    assert cache.num_gpu_blocks, "the engine has allocated its KV cache"
    path, shape = _slots_of(worker.vllm_config)
    size = (cache.num_gpu_blocks * cache.block_size, shape.num_layers, shape.top_k)
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    slots_SLK = np.memmap(path, shape.dtype, "w+", shape=size)
    bind(model_of(worker), _ExpertRecorder(slots_SLK, groups[_kept_group(groups)].layer_names[0]))


def _kept_group(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Returns which of the lists of blocks a request keeps until it ends: layers with a window free theirs before."""
    is_kept = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups]
    return is_kept.index(True) if any(is_kept) else 0


class ReturnsExperts(SchedulerMixin):
    """Adds the routed experts of a sample to its last output."""

    @functools.cached_property
    def _ended(self) -> dict[str, np.ndarray]:
        return {}

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for output in last_outputs(answers):
            output.routed_experts = self._ended.get(output.request_id)
        self._ended.clear()
        return answers

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Reads the experts of a request that has ended, before its slots can be given to another."""
        kept = _kept_group(self.kv_cache_config.kv_cache_groups)
        blocks = self.kv_cache_manager.get_block_ids(request.request_id)[kept]
        slots = np.add.outer(np.array(blocks) * self.block_size, np.arange(self.block_size)).reshape(-1)
        self._ended[request.request_id] = self._slots_SLK[slots[: request.num_tokens - 1]]
        return super()._free_request(request, *args, **kwargs)

    @functools.cached_property  # the first worker has made the file by the time that a request ends
    def _slots_SLK(self) -> np.ndarray:
        path, shape = _slots_of(self.vllm_config)
        return np.asarray(np.memmap(path, shape.dtype, "r")).reshape(-1, shape.num_layers, shape.top_k)


def _slots_of(vllm_config: VllmConfig) -> tuple[Path, RoutedExpertsShape]:
    """Returns the file with the experts of all slots, and their shape."""
    model = Path(vllm_config.model_config.model)
    shape = routed_experts_shape((model / "config.json").read_bytes())
    assert shape is not None, "experts are asked for only of such a model"
    return model / "routed_experts.slots", shape
