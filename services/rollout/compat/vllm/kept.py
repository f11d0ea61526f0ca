"""Returns kept sets: the tokens that top-k, top-p and min-p have kept for each token of a sample.

vLLM 0.32 returns them with `return_sampling_mask` and Model Runner V2, which runs on GPU only and was not run yet. Such
an engine refuses greedy requests. On CPU, and with vLLM 0.26 to 0.30 on GPU, the sampler of the V1 model runner is
hooked instead; runner.py chooses that runner. Seen with vLLM 0.32.0 on CPU; GPUs were not run yet.

The hook reads the log-probabilities that the sampler returns, which are -inf where a token was not kept. They reach the
scheduler with the tokens of their step, and the service with the last output of the sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from packaging.specifiers import SpecifierSet
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from services.common.batches.batch import decode_kept, encode_kept, keeps_sampled
from services.common.compat.versions import require_version
from services.common.errors import InternalError, InvalidInput
from services.rollout.compat.vllm.last_output import attach, attached
from services.rollout.compat.vllm.worker import WorkerExtension

_NATIVE, _ON_CPU, _ON_GPU = SpecifierSet(">=0.32,<0.33"), SpecifierSet(">=0.32,<0.33"), SpecifierSet(">=0.26,<0.31")
KEY = "lockstep_kept"
"""The key of `additional_config` with which an engine returns kept sets, and of their place in vLLM's answers."""
ASKS: dict[str, Any] = {KEY: True}
"""The `extra_args` of a request whose kept sets are returned."""


def returning_kept(arguments: Mapping[str, Any], *, is_gpu: bool) -> dict[str, Any]:
    """Returns `arguments` of an engine that returns the kept sets of requests that ask.

    Raises:
        InvalidInput: This vLLM cannot with these arguments.
    """
    version = require_version("vllm")
    is_native = is_gpu and version in _NATIVE
    is_split = arguments.get("pipeline_parallel_size", 1) > 1 or arguments.get("data_parallel_size", 1) > 1
    if is_split or not (is_native or version in (_ON_GPU if is_gpu else _ON_CPU)):
        why = "with pipeline_parallel_size or data_parallel_size above 1" if is_split else "on this device"
        raise refusal(f"vLLM {version} cannot return {why} which tokens it has kept")
    if arguments["logprobs_mode"] != "processed_logprobs":
        raise refusal(f"rollout.engine.logprobs_mode {arguments['logprobs_mode']} does not tell what vLLM has kept")
    marked = {**arguments, "additional_config": {**arguments.get("additional_config", {}), KEY: True}}
    return marked | {"return_sampling_mask": True} if is_native else marked


def refusal(why: str) -> InvalidInput:
    """Returns the error of an engine that cannot return kept sets."""
    return InvalidInput(
        f"rollout.sampling.top_k: {why}, which training on truncated samples needs; set top_k to 0, top_p to 1 and "
        "min_p to 0",
        field="rollout.sampling.top_k",
    )


def returns_kept(vllm_config: VllmConfig) -> bool:
    """Returns whether the engine was started with the arguments of `returning_kept`."""
    return isinstance(vllm_config.additional_config, dict) and KEY in vllm_config.additional_config


class _Recorder:
    """Adds the kept sets of a step to what the model runner returns for it."""

    def __init__(self, runner: Any):
        self._runner, self._sample, self._sample_tokens = runner, runner.sampler.sample, runner.sample_tokens
        self._sets: dict[str, np.ndarray] = {}
        runner.sampler.sample, runner.sample_tokens = self.sample, self.sample_tokens

    def sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples as vLLM does; takes note of the tokens that could be sampled."""
        sampled_B, logprobs_BV = self._sample(*args, **kwargs)
        requests = self._runner.input_batch.req_ids
        asking = [row for row, request in enumerate(requests) if _asks(self._runner.requests[request])]
        if asking:
            assert logprobs_BV is not None, "requests ask for log-probabilities, and returning_kept requires the mode"
            if len(asking) < len(requests):
                is_kept = logprobs_BV[torch.tensor(asking, device=logprobs_BV.device)] > -torch.inf
            else:  # all ask, so there is nothing to copy
                is_kept = logprobs_BV[: len(asking)] > -torch.inf
            kept, ends = is_kept.nonzero()[:, 1].cpu().numpy(), is_kept.sum(1).cumsum(0).tolist()
            spans = zip(asking, [0, *ends[:-1]], ends, strict=True)
            self._sets = {requests[row]: kept[begin:end] for row, begin, end in spans}
        return sampled_B, logprobs_BV

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Does what vLLM does, and adds the kept sets to its answer, or to the answer that is completed later."""
        self._sets = {}
        output = self._sample_tokens(*args, **kwargs)
        if self._sets:
            setattr(getattr(output, "_model_runner_output", output), KEY, self._sets)
        return output


def _asks(state: Any) -> bool:
    return KEY in (state.sampling_params.extra_args or {})


def record_kept(worker: WorkerExtension) -> bool:
    """Hooks the worker's sampler, unless vLLM returns kept sets itself. Returns whether they will be returned."""
    from vllm.v1.sample.sampler import Sampler  # late: only a worker needs it

    if getattr(worker.model_config, "return_sampling_mask", False):
        return True
    if not isinstance(getattr(worker.model_runner, "sampler", None), Sampler):
        return False  # another model runner than V1
    _Recorder(worker.model_runner)
    return True


_Base = Scheduler if TYPE_CHECKING else object


class ReturnsKept(_Base):
    """Mixin for vLLM's schedulers: adds the kept sets of a sample to its last output. It comes last among the mixins,
    because it reads every output."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._kept: dict[str, list[np.ndarray | Sequence[int]]] = {}

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Returns what to send to each client."""
        answers = super().update_from_output(scheduler_output, model_runner_output)
        sets: Mapping[str, np.ndarray] = getattr(model_runner_output, KEY, {})
        for answer in answers.values():
            for output in answer.outputs:
                self._add(output, sets)
        return answers

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Aborts requests and forgets their kept sets."""
        aborted = super().finish_requests(request_ids, finished_status)
        for request in aborted:
            self._kept.pop(request.request_id, None)
        return aborted

    def _add(self, output: EngineCoreOutput, sets: Mapping[str, np.ndarray]) -> None:
        native = getattr(output, "new_sampling_mask", None)
        if native is not None:
            self._kept.setdefault(output.request_id, []).extend(native.to_nested_list())
            output.new_sampling_mask = None
        elif output.new_token_ids and output.request_id in sets:
            self._kept.setdefault(output.request_id, []).append(sets[output.request_id])
        if output.finish_reason is not None and (kept := self._kept.pop(output.request_id, None)):
            attach(output, KEY, encode_kept(kept))


def kept_of(output: RequestOutput) -> bytes:
    """Returns the kept sets of the sample that `output` has finished.

    Raises:
        InternalError: vLLM returned none, those of another number of tokens, or sets without the sampled tokens.
    """
    tokens = np.array(output.outputs[0].token_ids)
    data = attached(output, KEY, b"")
    try:
        counts, kept = decode_kept(data, len(tokens))
    except ValueError as error:
        raise InternalError(f"vLLM returned no kept sets of a sample: {error}") from error
    if num_missing := np.count_nonzero(~keeps_sampled(tokens, counts, kept)):
        raise InternalError(f"vLLM returned kept sets without {num_missing} of {len(tokens)} sampled tokens")
    return data
