"""Finds the replicas that do not take part in a publication: their services answer, but their engines hang."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from services.common.errors import DeadlineExceeded, LockstepError, Reason
from services.coordinator.services.clients.replica import Replica

Result = TypeVar("Result")

# Number of attempts in a row after which a replica is dropped. A single one can be due to a busy host or network.
_MAX_MISSES = 2


class Attendance:
    """Counts for each replica how many attempts in a row it missed."""

    def __init__(self, grace_s: float):
        """Counts nothing yet. When a member has given up, the others have `grace_s` seconds to notice and to answer."""
        self._grace_s = grace_s
        self._ranks: Mapping[Replica, range] = {}
        self._absent: Sequence[Replica] = ()  # in the last phase, if it failed
        self._misses: Counter[Replica] = Counter()

    def assign_ranks(self, replicas: Sequence[Replica], first: int) -> Mapping[Replica, range]:
        """Gives each replica's workers their ranks in a weight group, from `first` on, and returns the ranks."""
        ranks: dict[Replica, range] = {}
        begin = first
        for replica in replicas:
            ranks[replica] = range(begin, begin + replica.num_workers)
            begin += replica.num_workers
        self._ranks = ranks
        return ranks

    async def gather(
        self,
        replicas: Sequence[Replica],
        calls: Sequence[Coroutine[Any, Any, Result]],
        *trainer: Coroutine[Any, Any, Result],
    ) -> list[Result]:
        """Runs one call to each of `replicas` and, if given, the trainer's. Returns their results in this order.

        Raises:
            LockstepError: RUN_REPLACED if a service answered so, else the first failure. Its message names the
                replicas that did not take part.
        """
        self._absent = ()
        tasks = [asyncio.ensure_future(call) for call in (*calls, *trainer)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = _failures(tasks)
            if not failures:
                return [task.result() for task in tasks]
            self._absent = self._named(failures)
            # A member that gave up has told the others, and commits do not depend on one another: all should answer.
            if not self._absent and (not trainer or any(map(_is_abort, failures))):
                await asyncio.wait(tasks, timeout=self._grace_s)
                failures = _failures(tasks)
                self._absent = self._named(failures) or _silent(replicas, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for error in failures:
            if isinstance(error, LockstepError) and error.reason is Reason.RUN_REPLACED:
                raise error  # it is the cause of the others
        self._misses.update(self._absent)
        raise _naming(self._absent, failures[0])

    def took_part(self, replicas: Sequence[Replica]) -> None:
        """Resets the counts of `replicas`, because all of them took part in a whole publication."""
        for replica in replicas:
            del self._misses[replica]

    def to_drop(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Returns those of `replicas` that missed too many attempts; none if all of them missed the last one."""
        missed = [replica for replica in replicas if replica in self._absent]
        if len(missed) == len(replicas):
            return []
        return [replica for replica in missed if self._misses[replica] >= _MAX_MISSES]

    def _named(self, failures: Sequence[BaseException]) -> list[Replica]:
        """Returns the replicas that the members of the weight group have named as absent."""
        told = [error.metadata.get("absent", "") for error in failures if isinstance(error, LockstepError)]
        ranks = {int(rank) for names in told for rank in names.split(",") if rank}
        return [replica for replica, own in self._ranks.items() if ranks & set(own)]


def _failures(tasks: Sequence[asyncio.Task[object]]) -> list[BaseException]:
    return [error for task in tasks if task.done() and (error := task.exception())]


def _is_abort(error: BaseException) -> bool:
    return isinstance(error, LockstepError) and error.reason is Reason.EPOCH_ABORTED


def _silent(replicas: Sequence[Replica], tasks: Sequence[asyncio.Task[object]]) -> list[Replica]:
    """Returns the replicas without an answer. Returns none if the trainer has no answer either and may be the cause."""
    is_silent = [not task.done() or isinstance(task.exception(), DeadlineExceeded) for task in tasks]
    if any(is_silent[len(replicas) :]):
        return []
    return [replica for replica, silent in zip(replicas, is_silent, strict=False) if silent]


def _naming(absent: Sequence[Replica], error: BaseException) -> BaseException:
    if not absent or not isinstance(error, LockstepError):
        return error
    addresses = " and ".join(replica.address for replica in absent)
    message = f"replica {addresses} did not take part: {error.message}"
    return type(error)(message, reason=error.reason, **error.metadata)
