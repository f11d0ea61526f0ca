"""Writes lines of JSON in a thread, to files of a limited size, and deletes the oldest files."""

import json
import logging
import queue
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger(__name__)

FILE_BYTES = 16 << 20
NUM_FILES = 16
# Maximum number of lines that wait for a slow disk, some tens of megabytes. Further lines are dropped, and a line says
# how many.
_MAX_WAITING = 1 << 16
_CLOSE_S = 10.0
_encode = json.JSONEncoder(separators=(",", ":")).encode
_NAME = re.compile(r"calls-(\d+)\.jsonl")

Line = Mapping[str, Any]


class LineFiles:
    """Appends lines to calls-<number>.jsonl in `directory`. A new file begins with each session and after FILE_BYTES.

    A disk that fails is logged once and ends the history of this session, never the run. What was written survives a
    kill of the process; lines of its last moments may be lost.

    Args:
        directory: Where the files are. It is created.
        first_line: The first line of the session. A file that continues another begins with the same line plus
            "continues"; its "t" is then the time of the last line before it, and its "rows" the last ledger row before
            it.
    """

    def __init__(self, directory: Path, first_line: Line):
        self._directory, self._first_line = directory, dict(first_line)
        self._waiting: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._file: BinaryIO | None = None
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._write_all, name="call-history", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Adds a line, which is soon on disk. Never waits and never fails."""
        if self._waiting.qsize() >= _MAX_WAITING:
            self._num_lost += 1
            return
        if self._num_lost:
            self._waiting.put({"lost": self._num_lost})
            self._num_lost = 0
        self._waiting.put(line)

    def close(self) -> None:
        """Waits until all lines are written, at most 10 s."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)

    def _write_all(self) -> None:
        try:
            self._open()
            while lines := self._next():
                self._write(lines)
                if self._num_bytes >= FILE_BYTES:
                    self._first_line["continues"] = True
                    self._open()
        except OSError as error:
            log.warning("%s gets no more lines: %s; the run goes on", self._directory, error)
            while self._waiting.get() is not None:
                pass
        finally:
            if self._file is not None:
                self._file.close()

    def _next(self) -> list[Line]:
        """Waits for a line, and returns it with all that have come since; an empty list is the end."""
        lines: list[Line] = []
        while not lines or not self._waiting.empty():
            line = self._waiting.get()
            if line is None:
                self._waiting.put(None)  # the next call returns it as the end
                return lines
            lines.append(line)
        return lines

    def _write(self, lines: list[Line]) -> None:
        assert self._file is not None
        content = "".join(f"{_encode(line)}\n" for line in lines).encode()
        self._file.write(content)
        self._num_bytes += len(content)
        self._first_line["t"] = lines[-1].get("t", self._first_line["t"])
        rows = [line["row"] for line in lines if "row" in line]
        self._first_line["rows"] = rows[-1] if rows else self._first_line["rows"]

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        self._directory.mkdir(exist_ok=True)
        files = line_files(self._directory)
        number = int(_NAME.fullmatch(files[-1].name)[1]) + 1 if files else 1  # type: ignore[index]
        for old in files[: max(0, len(files) + 1 - NUM_FILES)]:
            old.unlink(missing_ok=True)
        path = self._directory / f"calls-{number:06d}.jsonl"
        self._file, self._num_bytes = path.open("xb", buffering=0), 0
        self._write([self._first_line])


def line_files(directory: Path) -> list[Path]:
    """Returns the files in `directory`, oldest first."""
    found = [path for path in directory.glob("calls-*.jsonl") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (len(path.name), path.name))
