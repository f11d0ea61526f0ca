"""Writes spans of a process to a file for Perfetto or chrome://tracing (in the Trace Event Format)."""

import itertools
import json
import logging
import os
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from services.common.telemetry.context import scoped
from services.common.telemetry.otel import Otel

log = logging.getLogger(__name__)


class Trace:
    """Appends spans to `path`, a JSON array without its closing bracket, so that a killed process leaves a valid trace.

    Times are of the host's clock, so that the files of several processes can be joined. With an empty path no file is
    written. The same spans are sent to `otel`, if given.
    """

    def __init__(self, path: str | Path, process: str, otel: Otel | None = None):
        self._path, self._process, self._otel = path, process, otel
        self._file: TextIO | None = None
        self._numbers = itertools.count()

    @contextmanager
    def span(self, name: str, **arguments: object) -> Generator[None]:
        """Records the block as a span; spans may overlap."""
        number = {"local": str(next(self._numbers))}
        self._write(ph="b", name=name, id2=number, args=arguments)
        try:
            with scoped(_current, self), self._otel.span(name, **arguments) if self._otel else nullcontext():
                yield
        finally:
            self._write(ph="e", name=name, id2=number)

    def close(self) -> None:
        """Sends the remaining spans to `otel`. The file needs no close."""
        if self._otel:
            self._otel.close()

    def _write(self, **event: object) -> None:
        if not self._path:
            return
        try:
            self._append(event)
        except OSError as error:  # the program must not fail because its trace does
            log.warning("%s gets no more spans: %s", self._path, error)
            self._path = ""

    def _append(self, event: dict[str, object]) -> None:
        if self._file is None:
            self._file = open(self._path, "a", buffering=1)  # noqa: SIM115 closed with the process
            if not self._file.tell():
                self._file.write("[\n")
            self._append({"ph": "M", "name": "process_name", "args": {"name": self._process}})
        common = {"cat": "lockstep", "pid": os.getpid(), "tid": 0, "ts": time.time_ns() / 1e3}
        self._file.write(json.dumps(common | event) + ",\n")


NO_TRACE = Trace("", "")
_current: ContextVar[Trace] = ContextVar("lockstep_trace", default=NO_TRACE)


def span(name: str, **arguments: object) -> AbstractContextManager[None]:
    """Records the block as a span in the trace of the current span; does nothing if there is none."""
    return _current.get().span(name, **arguments)


def join(paths: list[Path], to: Path) -> None:
    """Writes the spans of the files `paths` to the file `to`, as one JSON array."""
    lines = [line.rstrip(",") for path in paths for line in path.read_text().splitlines() if line.endswith("},")]
    to.write_text("[\n" + ",\n".join(lines) + "\n]\n")
