"""Tells the campaign what a process is about to do and waits for its leave: there the faults are injected.

The process connects to a Unix socket, writes `<who>.<what>.<when>` and goes on when a line comes back. A line `clock N`
makes the process's clock jump by N seconds.
"""

import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from services.common.rpc.server import StatusInterceptor
from services.coordinator.runs.ledger import Ledger

_PATIENCE_S = 60.0
_time, _time_ns = time.time, time.time_ns


def _pass(path: Path, event: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE_S)
            connection.connect(str(path))
            connection.sendall(f"{event}\n".encode())
            answer = connection.makefile().readline().split()
    except OSError:  # the campaign has ended, or this process has no descriptor left
        return
    if answer[:1] == ["clock"]:
        jump_s = int(answer[1])
        time.time = lambda: _time() + jump_s
        time.time_ns = lambda: _time_ns() + jump_s * 10**9


def guard_calls(path: Path, who: str) -> None:
    """Makes every call to the services of this process pass the gate when it begins and when it has ended."""
    answering = StatusInterceptor._answering

    @contextlib.asynccontextmanager
    async def guarded(self: Any, context: Any, method: str) -> AsyncGenerator[None]:
        name = method.rpartition("/")[2]
        async with answering(self, context, method):
            _pass(path, f"{who}.{name}.begin")
            yield
            _pass(path, f"{who}.{name}.end")

    StatusInterceptor._answering = guarded  # type: ignore[method-assign]


def guard_rows(path: Path) -> None:
    """Makes every row of the ledger pass the gate when it is on disk."""
    record, transaction = Ledger.record, Ledger.transaction

    def recording(self: Ledger, kind: Any, version: int | None = None, **body: Any) -> int:
        number = record(self, kind, version, **body)
        if not self._db.in_transaction:
            _pass(path, f"coordinator.{kind}.end")
        return number

    @contextlib.contextmanager
    def in_transaction(self: Ledger) -> Iterator[None]:
        _pass(path, "coordinator.batch.begin")
        with transaction(self):
            yield
        _pass(path, "coordinator.batch.end")

    Ledger.record, Ledger.transaction = recording, in_transaction  # type: ignore[method-assign]
