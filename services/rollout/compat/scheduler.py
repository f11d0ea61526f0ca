"""Makes vLLM's scheduler send the tokens of a sample 32 at a time, and count what was drafted for each sample.

Schedulers can be set (`scheduler_cls`), but vLLM says that their interface is not public. Seen with vLLM 0.26.0 and
0.32.0.
"""

import copy
import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from lockstep.rollout.v1.rollout_pb2 import Drafts
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from services.rollout.compat import recorded
from services.rollout.compat.recorded import SchedulerMixin, attach, attached, last_outputs

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

# The last step of a chunk may add several tokens. A chunk must stay below 64, because vLLM sends an array of 64 numbers
# as a frame of its own, and vLLM 0.26 then overwrites the memory of a long message that ZeroMQ has not sent yet.
_CHUNK_TOKENS = 32
_FEWEST, _DRAFTS = "lockstep_fewest", "lockstep_drafts"


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
    """The tokens of a sample that were not sent yet, with their log-probabilities, ranks and routed experts."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._ranks: list[int] = []
        self._experts: list[np.ndarray] = []

    def add(self, output: EngineCoreOutput, step: _StepLogprobs | None) -> None:
        self.tokens.extend(output.new_token_ids)
        if step and output.new_logprobs is not None:
            begin: Any = output.new_logprobs
            end = begin + len(output.new_token_ids)
            self._logprobs.extend(step.logprobs[begin:end])
            self._ranks.extend(step.ranks[begin:end])
        if output.routed_experts is not None:  # vLLM 0.26 returns those of each step; its client joins them
            self._experts.append(output.routed_experts)

    def move_into(self, output: EngineCoreOutput) -> None:
        """Puts all that was added into `output`. Add nothing afterwards."""
        output.new_token_ids, output.new_logprobs = self.tokens, None
        if self._logprobs:
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self._logprobs, np.float32)
            output.new_logprobs = LogprobsLists(tokens[:, None], logprobs[:, None], np.array(self._ranks, np.int32))
        if self._experts:
            output.routed_experts = np.concatenate(self._experts)


class InChunks(SchedulerMixin):
    """Sends a sample's first token (for vLLM's statistics), chunks, and the rest.

    Reason: by default vLLM sends each token at once, for clients that display text as it is generated. Every message is
    serialized on the CPU core that also schedules and launches, and is decoded by the service, which has no such
    clients.
    """

    @functools.cached_property
    def _unsent(self) -> dict[str, _Unsent]:
        return self.new_table()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        step = None
        if lists := model_runner_output.logprobs:
            step = _StepLogprobs(lists)
            model_runner_output = copy.copy(model_runner_output)  # the caller's object stays as it is
            model_runner_output.logprobs = cast(LogprobsLists, step)
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for answer in answers.values():
            answer.outputs = [output for output in answer.outputs if self._is_due(output, step)]
        if ended := list(last_outputs(answers)):
            # The service knows only of tokens that were sent, so it is told how many the shortest sample has by now.
            fewest = min((request.num_output_tokens for request in self.requests.values()), default=0)
            for output in ended:
                attach(output, _FEWEST, fewest)
        return {
            client: answer
            for client, answer in answers.items()
            if answer.outputs or answer.scheduler_stats or answer.finished_requests
        }

    def _is_due(self, output: EngineCoreOutput, step: _StepLogprobs | None) -> bool:
        """Returns whether `output` is to be sent now; if so, adds the unsent tokens to it."""
        is_finished, unsent = output.finish_reason is not None, self._unsent.get(output.request_id)
        if unsent is None:  # the sample's first output is sent at once
            if step and output.new_logprobs is not None:
                step.restore(output)
        else:
            unsent.add(output, step)
            if not (is_finished or output.events or len(unsent.tokens) >= _CHUNK_TOKENS):
                return False
            unsent.move_into(output)
        if is_finished:
            self._unsent.pop(output.request_id, None)
        else:
            self._unsent[output.request_id] = _Unsent()
        return True


def fewest_of(output: RequestOutput) -> int:
    """Returns a number of tokens that all samples had, or had exceeded, when the engine ended the sample of `output`;
    without those that the engine had not seen yet."""
    return attached(output, _FEWEST, 0)


# Seconds that this process has looked for drafts, one number for each search, since a sample ended.
_searches_s: list[float] = []


def _timed(propose: Callable[Parameters, Answer]) -> Callable[Parameters, Answer]:
    @functools.wraps(propose)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
        begin = time.perf_counter()
        try:
            return propose(*args, **kwargs)
        finally:
            _searches_s.append(time.perf_counter() - begin)

    return call


def time_drafts() -> None:
    """Measures from here on how long this process looks for tokens that occurred before. With one worker, the worker is
    in this process."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer  # late: it imports numba
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    proposers: tuple[Any, ...] = (NgramProposer, SuffixDecodingProposer)
    for proposer in proposers:
        if not hasattr(proposer.propose, "__wrapped__"):
            proposer.propose = _timed(proposer.propose)


class CountsDrafts(SchedulerMixin):
    """Adds the drafts of a sample to its last output.

    Reason: vLLM counts drafted and accepted tokens for the whole engine, only together with all its other statistics,
    which cost work in every step, and does not say for which samples. (0.32 can count for each request, 0.26 cannot.)
    It does not measure how long drafting takes. Seen with vLLM 0.32.0; 0.26.0 was not run.
    """

    @functools.cached_property
    def _drafts(self) -> dict[str, Drafts]:
        return self.new_table()

    def make_spec_decoding_stats(self, *args: Any, **counts: Any) -> Any:
        """Counts one draft of one sample. vLLM calls this for each, whether it keeps statistics or not."""
        if num_drafted := counts["num_draft_tokens"]:
            invalid = (counts["num_invalid_spec_tokens"] or {}).get(counts["request_id"], 0)
            drafts = self._drafts.setdefault(counts["request_id"], Drafts())
            drafts.num_drafts += 1
            drafts.num_drafted += num_drafted - invalid
            # With those that would have become tokens of the sample if it had not ended before them.
            drafts.num_accepted += counts["num_accepted_tokens"]
        return super().make_spec_decoding_stats(*args, **counts)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for output in last_outputs(answers):
            drafts = self._drafts.pop(output.request_id, None) or Drafts()
            drafts.seconds = sum(_searches_s)
            _searches_s.clear()
            attach(output, _DRAFTS, drafts.SerializeToString())
        return answers


def drafts_of(output: RequestOutput) -> Drafts:
    """Returns the counts of the sample that `output` has finished; zeros without speculative decoding."""
    return Drafts.FromString(attached(output, _DRAFTS, b""))


def kind_of(vllm_config: VllmConfig) -> type[Scheduler]:
    """Returns the scheduler class that vLLM would use."""
    return AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler


def scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """Returns vLLM's scheduler with our mixins; this is the engine argument `scheduler_cls`."""
    mixins: list[type] = [InChunks]
    if recorded.is_marked(vllm_config, recorded.EXPERTS):
        mixins.insert(0, recorded.ReturnsExperts)
    if vllm_config.speculative_config:
        mixins.insert(0, CountsDrafts)
        time_drafts()
    if recorded.is_marked(vllm_config, recorded.MASKS):
        mixins.append(recorded.ReturnsMasks)
    made: Scheduler = type("Scheduler", (*mixins, kind_of(vllm_config)), {})(vllm_config=vllm_config, **arguments)
    return made
