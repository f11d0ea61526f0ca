"""Notes every call of a coordinator, and the rows of its ledger, in the order in which they happened.

Lines are JSON objects. `t` is the monotonic clock of the host in seconds, `n` the number of a call in its session. A
call has a line when it is sent ("call", "peer", "sent"), one for each part of a streamed request that has ids or hashes
("sent"), and one when it ends ("end": OK, the reason of an error, or CANCELLED; "got": what its answers said).
"""

import itertools
import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from services.common.errors import described
from services.common.rpc.history.files import LineFiles
from services.common.rpc.history.ids import ids_of
from services.common.telemetry.context import scoped

_current: ContextVar["CallHistory | None"] = ContextVar("lockstep_call_history", default=None)


class CallHistory:
    """Writes the history of one session of a run to files in `directory`; the ledger had `num_rows` rows before it."""

    def __init__(self, directory: Path, run_id: str, num_rows: int):
        self._numbers = itertools.count(1)
        began = {"time": time.time(), "session": run_id, "rows": num_rows, "continues": False}
        self._files = LineFiles(directory, {"t": _now_s(), **began})

    def row(self, number: int, kind: str, version: int | None) -> None:
        """Notes a row of the ledger, which is on disk."""
        self._put({"row": number, "kind": kind, "version": version})

    @contextmanager
    def call(self, method: str, peer: str, request: object) -> Generator["NotedCall"]:
        """Notes the block as a call."""
        number = next(self._numbers)
        sent = ids_of(request) if isinstance(request, Message) else {}
        self._put({"n": number, "call": method, "peer": peer, "sent": sent})
        noted, end = NotedCall(self, number), "CANCELLED"
        try:
            yield noted
            end = "OK"
        except Exception as error:
            end = described(error)[0]
            raise
        finally:
            self._put({"n": number, "end": end, "got": noted.answers})

    def sent(self, number: int, message: Message) -> None:
        """Notes a part of a call's request, if it has ids or hashes."""
        if ids := ids_of(message):
            self._put({"n": number, "sent": ids})

    def close(self) -> None:
        """Waits until all lines are written, at most 10 s."""
        self._files.close()

    def _put(self, line: dict[str, Any]) -> None:
        self._files.put({"t": _now_s(), **line})


def _now_s() -> float:
    return round(time.monotonic(), 6)


class NotedCall:
    """Notes one call in a history."""

    def __init__(self, history: CallHistory | None, number: int):
        self._history, self._number = history, number
        self.answers: list[dict[str, Any]] = []

    def sending(self, request: Any) -> Any:
        """Returns `request`, whose parts are noted as they are sent, if it is a stream."""
        if self._history is None or isinstance(request, Message):
            return request
        return self._parts(self._history, request)

    async def _parts(self, history: CallHistory, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in messages:
            history.sent(self._number, message)
            yield message

    def got(self, answer: Any) -> None:
        """Notes an answer."""
        if self._history is not None and (ids := ids_of(answer)):
            self.answers.append(ids)


@contextmanager
def keeping(directory: Path, run_id: str, num_rows: int) -> Generator[None]:
    """Keeps a history of the calls and rows of the block, and of tasks created in it, in `directory`."""
    history = CallHistory(directory, run_id, num_rows)
    try:
        with scoped(_current, history):
            yield
    finally:
        history.close()


@contextmanager
def noting(method: str, peer: str, request: object) -> Generator[NotedCall]:
    """Notes the block as a call in the current history; does nothing if there is none."""
    history = _current.get()
    if history is None:
        yield NotedCall(None, 0)
        return
    with history.call(method, peer, request) as noted:
        yield noted


def note_row(number: int, kind: str, version: int | None) -> None:
    """Notes a row of the ledger in the current history; does nothing if there is none."""
    history = _current.get()
    if history is not None:
        history.row(number, kind, version)
