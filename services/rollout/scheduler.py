"""vLLM's scheduler, which sends the tokens of a sample some at a time.

By itself it sends each on its way for people who read along: serialized on the processor core that also schedules and
launches, and taken apart by the service. Nobody reads along here.
"""

from array import array
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

# Far enough below 64, from which on vLLM sends an array as a frame of its own: 0.26 then writes into the memory of a
# long message that ZeroMQ has not sent yet.
_CHUNK_TOKENS = 32


class _Held:
    """What was not sent yet of a sample."""

    def __init__(self) -> None:
        self._tokens, self._logprobs, self._ranks = array("i"), array("f"), array("i")
        self._events: list[Any] = []

    @property
    def is_chunk(self) -> bool:
        return len(self._tokens) >= _CHUNK_TOKENS

    def add(self, output: Any) -> None:
        self._tokens.extend(output.new_token_ids)
        self._events += output.events or ()
        if output.new_logprobs is not None:  # of the sampled token alone
            self._logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            self._ranks.extend(output.new_logprobs.sampled_token_ranks.tolist())

    def move_into(self, output: Any) -> None:
        output.new_token_ids, output.events = self._tokens.tolist(), self._events or None
        if self._logprobs:
            tokens, logprobs = np.array(self._tokens)[:, None], np.array(self._logprobs)[:, None]
            output.new_logprobs = LogprobsLists(tokens, logprobs, np.array(self._ranks))
        del self._tokens[:], self._logprobs[:], self._ranks[:]
        self._events = []


class InChunks:
    """Before one of vLLM's schedulers among the bases of a class."""

    requests: dict[str, Any]
    """vLLM's: those that are not finished."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}

    def update_from_output(self, *args: Any) -> dict[int, Any]:
        """What to send to each client: of a sample the first token, by which vLLM counts, then chunks, and the rest."""
        answers: dict[int, Any] = super().update_from_output(*args)  # type: ignore[misc]
        for answer in answers.values():
            answer.outputs = [output for output in answer.outputs if self._is_due(output)]
        return {client: answer for client, answer in answers.items() if _says_something(answer)}

    def finish_requests(self, *args: Any) -> Any:
        """Aborts, and forgets what was aborted."""
        aborted = super().finish_requests(*args)  # type: ignore[misc]
        self._held = {name: held for name, held in self._held.items() if name in self.requests}
        return aborted

    def _is_due(self, output: Any) -> bool:
        is_finished, held = output.finish_reason is not None, self._held.get(output.request_id)
        is_due = is_finished or held is None
        if held is None:
            self._held[output.request_id] = _Held()
        else:
            held.add(output)
            if is_due := is_finished or held.is_chunk:
                held.move_into(output)
        if is_finished:
            del self._held[output.request_id]
        return is_due


class _Scheduler(InChunks, Scheduler):
    pass


class _AsyncScheduler(InChunks, AsyncScheduler):
    pass


def scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """The engine argument `scheduler_cls`: of the kind that vLLM would take."""
    kind = _AsyncScheduler if vllm_config.scheduler_config.async_scheduling else _Scheduler
    return kind(vllm_config=vllm_config, **arguments)


def _says_something(answer: Any) -> bool:
    return bool(answer.outputs or answer.scheduler_stats or answer.finished_requests)
