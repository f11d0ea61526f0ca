"""Counts what speculative decoding drafts for each sample, in vLLM's scheduler.

Reason: vLLM counts drafted and accepted tokens for the whole engine, only together with all its other statistics, which
cost work in every step, and does not say for which samples. (0.32 can count for each request, 0.26 cannot.) It does not
measure how long drafting takes. Seen with vLLM 0.32.0; 0.26.0 was not run.
"""

import functools
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm.outputs import RequestOutput
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from services.rollout.compat.vllm.last_output import attach, attached

_KEY = "lockstep_drafts"


@dataclass(slots=True)
class Drafts:
    """Counts the tokens that were drafted for one sample."""

    num_drafts: int = 0
    """Number of times that tokens were drafted and verified."""
    num_drafted: int = 0
    """Number of drafted tokens."""
    num_accepted: int = 0
    """Number of drafted tokens that became tokens of the sample, or would have if it had not ended before them."""
    seconds: float = 0.0
    """Time that the engine spent looking for drafts since another sample had ended. Only ngram and suffix are measured,
    and only in engines with one worker."""


class _Stopwatch:
    """Measures calls in this process."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def timed(self, function: Any) -> Any:
        """Returns `function`, measured."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - begin

        return call

    def take(self) -> float:
        """Returns the seconds since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


_drafting = _Stopwatch()


def time_drafts() -> None:
    """Measures from here on how long this process looks for tokens that occurred before. With one worker, the worker is
    in this process."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer  # late: it imports numba
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    proposers: tuple[Any, ...] = (NgramProposer, SuffixDecodingProposer)
    for proposer in proposers:
        if not hasattr(proposer.propose, "__wrapped__"):
            proposer.propose = _drafting.timed(proposer.propose)


_Base = Scheduler if TYPE_CHECKING else object


class CountsDrafts(_Base):
    """Mixin for vLLM's schedulers: adds the drafts of a sample to its last output."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._drafts: dict[str, Drafts] = {}

    def make_spec_decoding_stats(self, *args: Any, **counts: Any) -> Any:
        """Counts one draft of one sample. vLLM calls this for each, whether it keeps statistics or not."""
        if num_drafted := counts["num_draft_tokens"]:
            invalid = (counts["num_invalid_spec_tokens"] or {}).get(counts["request_id"], 0)
            drafts = self._drafts.setdefault(counts["request_id"], Drafts())
            drafts.num_drafts += 1
            drafts.num_drafted += num_drafted - invalid
            drafts.num_accepted += counts["num_accepted_tokens"]
        return super().make_spec_decoding_stats(*args, **counts)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Returns what to send to each client."""
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for answer in answers.values():
            for output in answer.outputs:
                if output.finish_reason is not None:
                    drafts = self._drafts.pop(output.request_id, None) or Drafts()
                    drafts.seconds = _drafting.take()
                    attach(output, _KEY, asdict(drafts))
        return answers

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Aborts requests and forgets their drafts."""
        aborted = super().finish_requests(request_ids, finished_status)
        for request in aborted:
            self._drafts.pop(request.request_id, None)
        return aborted


def drafts_of(output: RequestOutput) -> Drafts:
    """Returns the counts of the sample that `output` has finished; zeros without speculative decoding."""
    return Drafts(**attached(output, _KEY, {}))
