"""Changes vLLM's scheduler to send the tokens of a sample 32 at a time.

Reason: by default vLLM sends each token at once, for clients that display text as it is generated. Every message is
serialized on the CPU core that also schedules and launches, and is decoded by the service, which has no such clients.
Schedulers can be set (`scheduler_cls`), but vLLM says that their interface is not public. Seen with vLLM 0.26.0 and
0.32.0.
"""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from services.rollout.compat.vllm.drafts import CountsDrafts, time_drafts
from services.rollout.compat.vllm.kept import ReturnsKept, returns_kept
from services.rollout.compat.vllm.last_output import attach, attached
from services.rollout.compat.vllm.routes import ReturnsRoutes, are_hooked

# The last step of a chunk may add several tokens. A chunk must stay below 64, because vLLM sends an array of 64 numbers
# as a frame of its own, and vLLM 0.26 then overwrites the memory of a long message that ZeroMQ has not sent yet.
_CHUNK_TOKENS = 32
_FEWEST = "lockstep_fewest"


class _StepLogprobs:
    """Stands in for the log-probabilities of a step while vLLM makes the outputs.

    Reason: vLLM slices three arrays for each sample in each step, and nearly all slices would only be joined to chunks.
    So an output gets the position of its first token instead, and chunks take their numbers from Python lists.
    """

    def __init__(self, lists: LogprobsLists):
        self._lists, self._begins = lists, lists.cu_num_generated_tokens
        self.logprobs: list[float] = lists.logprobs[:, 0].tolist()  # has the sampled token only
        self.ranks: list[int] = lists.sampled_token_ranks.tolist()

    def slice_request(self, req_idx: int, num_positions: int) -> int:
        """Returns the position of a sample's first token in this step; vLLM calls this."""
        return req_idx if self._begins is None else self._begins[req_idx]

    def restore(self, output: EngineCoreOutput) -> None:
        """Replaces the position in `output` by what vLLM itself would have put there."""
        begin: Any = output.new_logprobs
        end = begin + len(output.new_token_ids)
        ids, logprobs, ranks, _ = self._lists
        output.new_logprobs = LogprobsLists(ids[begin:end], logprobs[begin:end], ranks[begin:end])


class _Unsent:
    """Collects the tokens of a sample that were not sent yet, with their log-probabilities, ranks and routes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._ranks: list[int] = []
        self._routes: list[np.ndarray] = []

    def add(self, output: EngineCoreOutput, step: _StepLogprobs | None) -> None:
        self.tokens.extend(output.new_token_ids)
        if step and output.new_logprobs is not None:
            begin: Any = output.new_logprobs
            end = begin + len(output.new_token_ids)
            self._logprobs.extend(step.logprobs[begin:end])
            self._ranks.extend(step.ranks[begin:end])
        if output.routed_experts is not None:  # vLLM 0.26 returns those of each step; its client joins them
            self._routes.append(output.routed_experts)

    def move_into(self, output: EngineCoreOutput) -> None:
        """Puts all that was added into `output`. Add nothing afterwards."""
        output.new_token_ids, output.new_logprobs = self.tokens, None
        if self._logprobs:
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self._logprobs, np.float32)
            output.new_logprobs = LogprobsLists(tokens[:, None], logprobs[:, None], np.array(self._ranks, np.int32))
        if self._routes:
            output.routed_experts = np.concatenate(self._routes)


_Base = Scheduler if TYPE_CHECKING else object


class InChunks(_Base):
    """Mixin for vLLM's schedulers; it must come before the scheduler among the base classes."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._unsent: dict[str, _Unsent] = {}

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Returns what to send to each client: a sample's first token (for vLLM's statistics), chunks, and the rest."""
        step = None
        if lists := model_runner_output.logprobs:
            step = _StepLogprobs(lists)
            model_runner_output = copy.copy(model_runner_output)  # the caller's object stays as it is
            model_runner_output.logprobs = cast(LogprobsLists, step)
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for answer in answers.values():
            answer.outputs = [output for output in answer.outputs if self._is_due(output, step)]
            self._report_fewest(answer.outputs)
        return {
            client: answer
            for client, answer in answers.items()
            if answer.outputs or answer.scheduler_stats or answer.finished_requests
        }

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Aborts requests and drops their unsent tokens."""
        aborted = super().finish_requests(request_ids, finished_status)
        for request in aborted:
            self._unsent.pop(request.request_id, None)
        return aborted

    def _report_fewest(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Adds to each last output how many tokens the sample with the fewest has by now. The service knows only of
        tokens that were sent."""
        ended = [output for output in outputs if output.finish_reason is not None]
        if ended:
            fewest = min((request.num_output_tokens for request in self.requests.values()), default=0)
            for output in ended:
                attach(output, _FEWEST, fewest)

    def _is_due(self, output: EngineCoreOutput, step: _StepLogprobs | None) -> bool:
        """Returns whether `output` is to be sent now; if so, adds the unsent tokens to it."""
        is_finished, held = output.finish_reason is not None, self._unsent.get(output.request_id)
        if held is None:
            if step and output.new_logprobs is not None:
                step.restore(output)
        else:
            held.add(output, step)
            if not (is_finished or output.events or len(held.tokens) >= _CHUNK_TOKENS):
                return False
            held.move_into(output)
        if is_finished:
            self._unsent.pop(output.request_id, None)
        else:
            self._unsent[output.request_id] = _Unsent()
        return True


def fewest_of(output: RequestOutput) -> int:
    """Returns a number of tokens that all samples had, or had exceeded, when the engine ended the sample of `output`;
    without those that the engine had not seen yet."""
    return attached(output, _FEWEST, 0)


def kind_of(vllm_config: VllmConfig) -> type[Scheduler]:
    """Returns the scheduler class that vLLM would use."""
    return AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler


def scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """Returns vLLM's scheduler with our mixins; this is the engine argument `scheduler_cls`."""
    mixins: list[type] = [InChunks]
    if are_hooked(vllm_config):
        mixins.insert(0, ReturnsRoutes)
    if vllm_config.speculative_config:
        mixins.insert(0, CountsDrafts)
        time_drafts()
    if returns_kept(vllm_config):
        mixins.append(ReturnsKept)
    made: Scheduler = type("Scheduler", (*mixins, kind_of(vllm_config)), {})(vllm_config=vllm_config, **arguments)
    return made
