"""vLLM's scheduler in an engine that tells of a sample once, when it is finished.

By itself it sends each token on its way for people who read along: serialized on the processor core that also schedules
and launches, and taken apart by the service. Nobody reads along here.
"""

from array import array
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists


class _Begun:
    """What is known of a sample, 12 bytes a token."""

    def __init__(self, first: Any):
        self._prefill_stats = first.prefill_stats
        self._tokens, self._logprobs, self._ranks = array("i"), array("f"), array("i")
        self._events: list[Any] = []

    def add(self, output: Any) -> None:
        self._tokens.extend(output.new_token_ids)
        self._events += output.events or ()
        if output.new_logprobs is not None:  # of the sampled token alone
            self._logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            self._ranks.extend(output.new_logprobs.sampled_token_ranks.tolist())

    def put_into(self, last: Any) -> None:
        last.prefill_stats, last.events = self._prefill_stats, self._events or None
        last.new_token_ids = self._tokens.tolist()
        if self._logprobs:
            tokens, logprobs = np.array(self._tokens)[:, None], np.array(self._logprobs)[:, None]
            last.new_logprobs = LogprobsLists(tokens, logprobs, np.array(self._ranks))


class WholeSamples:
    """Before one of vLLM's schedulers among the bases of a class."""

    requests: dict[str, Any]
    """vLLM's: those that are not finished."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._begun: dict[str, _Begun] = {}

    def update_from_output(self, *args: Any) -> dict[int, Any]:
        """What to send to each client: samples that are finished, and what vLLM adds."""
        answers: dict[int, Any] = super().update_from_output(*args)  # type: ignore[misc]
        for answer in answers.values():
            answer.outputs = [output for output in answer.outputs if self._is_whole(output)]
        return {client: answer for client, answer in answers.items() if _says_something(answer)}

    def finish_requests(self, *args: Any) -> Any:
        """Aborts, and forgets what was aborted."""
        aborted = super().finish_requests(*args)  # type: ignore[misc]
        self._begun = {name: begun for name, begun in self._begun.items() if name in self.requests}
        return aborted

    def _is_whole(self, output: Any) -> bool:
        begun = self._begun.get(output.request_id)
        if begun is None:
            begun = self._begun[output.request_id] = _Begun(output)
        begun.add(output)
        if output.finish_reason is None:
            return False
        self._begun.pop(output.request_id).put_into(output)
        return True


class _Whole(WholeSamples, Scheduler):
    pass


class _WholeAsync(WholeSamples, AsyncScheduler):
    pass


def scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """The engine argument `scheduler_cls`: of the kind that vLLM would take."""
    kind = _WholeAsync if vllm_config.scheduler_config.async_scheduling else _Whole
    return kind(vllm_config=vllm_config, **arguments)


def _says_something(answer: Any) -> bool:
    return bool(answer.outputs or answer.scheduler_stats or answer.finished_requests)
