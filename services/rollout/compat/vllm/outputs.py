"""What the scheduler's mixins share: tables by request, and values that travel with the last output of a sample."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.outputs import RequestOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

Value = TypeVar("Value")


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
