"""Notes every call of a coordinator, and the rows of its ledger, in the order in which they happened.

Lines are JSON objects. `t` is the monotonic clock of the host in seconds, `n` the number of a call in its session. A
call has a line when it is sent ("call", "peer", "sent"), one for each part of a streamed request that has ids or hashes
("sent"), and one when it ends ("end": OK, the reason of an error, or CANCELLED; "got": what its answers said).
"""

import functools
import hashlib
import itertools
import json
import logging
import queue
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from services.common.errors import described
from services.common.telemetry import scoped

log = logging.getLogger(__name__)

FILE_BYTES = 16 << 20
NUM_FILES = 16
# Maximum number of lines that wait for a slow disk, some tens of megabytes. Further lines are dropped, and a line says
# how many.
_MAX_WAITING = 1 << 16
_CLOSE_S = 10.0
_encode = json.JSONEncoder(separators=(",", ":")).encode
_NAME = re.compile(r"calls-(\d+)\.jsonl")

Line = Mapping[str, object]
# Reads the value of a field, which is a message, a map or a scalar.
_Reader = Callable[[Any], object]


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
        self.call_numbers = itertools.count(1)
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
        self._num_bytes += len(content)
        while content:  # a disk that is nearly full takes a part, without an error
            content = content[self._file.write(content) :]
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
        # Without a buffer of Python, what was written survives a kill of the process.
        self._file, self._num_bytes = path.open("xb", buffering=0), 0
        self._write([self._first_line])


def line_files(directory: Path) -> list[Path]:
    """Returns the files in `directory`, oldest first."""
    files = [path for path in directory.glob("calls-*.jsonl") if _NAME.fullmatch(path.name)]
    return sorted(files, key=lambda path: (len(path.name), path.name))  # a number may outgrow its six digits


_TEXTS = {"run_id", "batch_id", "last_batch_id", "prompt_id", "episode_id", "path", "checkpoint_path"}
_HASHES = {"digest", "plan_digest", "manifest_digest", "sha256", "samples_sha256"}
_NUMBERS = {"version", "critic_version", "epoch", "world_size", "turn", "num_workers", "role", "part"}
_FLAGS = {"replayed", "done"}
_STAMPS = {"expected_stamp", "drawn_stamp", "stamp"}
_PARTS = {"header", "block", "commit", "group"}
_NOTED = _TEXTS | _HASHES | _NUMBERS | _FLAGS | _STAMPS | _PARTS | {"prompts", "metrics", "scores"}
# Hexadecimal digits of a hash: 128 bits, as many as those of the weights have.
_DIGITS = 32


def ids_of(message: Message) -> dict[str, object]:
    """Returns the noted fields of `message`, as JSON values: a stamp is [version, digest], metrics and scores are
    their hashes."""
    ids: dict[str, object] = {}
    for name, has_presence, read in _readers(message.DESCRIPTOR):
        if has_presence and not message.HasField(name):
            continue
        value = read(getattr(message, name))
        if value != "" and value is not False:
            ids[name] = value
    return ids


@functools.cache
def _readers(kind: Descriptor) -> list[tuple[str, bool, _Reader]]:
    """Returns, for each field of `kind` that is noted, its name, whether it can be absent, and what reads its value."""
    return [(field.name, field.has_presence, _reader(field)) for field in kind.fields if field.name in _NOTED]


def _reader(field: FieldDescriptor) -> _Reader:
    name = field.name
    if name in _STAMPS:
        return lambda stamp: [stamp.version, stamp.digest]
    if name in _PARTS:
        return ids_of
    if name == "prompts":
        return lambda prompts: [prompt.prompt_id for prompt in prompts]
    if name == "metrics":
        return lambda metrics: _hash(sorted(metrics.items()))
    if name == "scores":
        return lambda scores: scores_hashes((score.reward, score.components) for score in scores)
    if name in _HASHES:
        return lambda value: (value if isinstance(value, str) else value.hex())[:_DIGITS]
    return lambda value: value


def scores_hashes(scores: Iterable[tuple[float, Mapping[str, float]]]) -> list[str]:
    """Returns the hash of the components, by name, and that of the rewards, of the samples of a group in order."""
    rewards, components = zip(*scores, strict=True) if (scores := list(scores)) else ((), ())
    return [_hash([sorted(one.items()) for one in components]), _hash(list(rewards))]


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:_DIGITS]


_current: ContextVar[LineFiles | None] = ContextVar("lockstep_call_history", default=None)


def _timed(line: Line) -> Line:
    return {"t": round(time.monotonic(), 6), **line}


class NotedCall:
    """One call in a history; without one, nothing is noted."""

    def __init__(self, history: LineFiles | None = None, number: int = 0):
        self._history, self._number = history, number
        self.answers: list[dict[str, object]] = []

    def sending(self, request: Any) -> Any:
        """Returns `request`, whose parts are noted as they are sent, if it is a stream."""
        if self._history is None or isinstance(request, Message):
            return request
        return self._noting_sent(self._history, request)

    async def _noting_sent(self, history: LineFiles, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for message in messages:
            if ids := ids_of(message):
                history.put(_timed({"n": self._number, "sent": ids}))
            yield message

    def got(self, answer: Message) -> None:
        if self._history is not None and (ids := ids_of(answer)):
            self.answers.append(ids)


@contextmanager
def keeping(directory: Path, run_id: str, num_rows: int) -> Generator[None]:
    """Keeps a history of the calls and rows of the block, and of tasks created in it, in `directory`.

    The block is a session of run `run_id`, whose ledger has `num_rows` rows before it.
    """
    began = {"time": time.time(), "session": run_id, "rows": num_rows, "continues": False}
    history = LineFiles(directory, _timed(began))
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
        yield NotedCall()
        return
    number = next(history.call_numbers)
    sent = ids_of(request) if isinstance(request, Message) else {}
    history.put(_timed({"n": number, "call": method, "peer": peer, "sent": sent}))
    noted, end = NotedCall(history, number), "CANCELLED"
    try:
        yield noted
        end = "OK"
    except Exception as error:
        end = described(error)[0]
        raise
    finally:
        history.put(_timed({"n": number, "end": end, "got": noted.answers}))


def note_row(number: int, kind: str, version: int | None) -> None:
    """Notes a row of the ledger, which is on disk, in the current history; does nothing if there is none."""
    history = _current.get()
    if history is not None:
        history.put(_timed({"row": number, "kind": kind, "version": version}))
