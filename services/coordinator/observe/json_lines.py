"""Writes metrics.jsonl, and repairs it from the ledger when a run resumes."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from services.common.files.storage import writing
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.reporter import Reporter

log = logging.getLogger(__name__)

_Place = tuple[int, bool]
"""Step of a line, and whether it is an evaluation, which comes after the step."""


class JsonLines(Reporter):
    """Writes one JSON object per step or evaluation.

    Lines that the disk does not take are written later, as soon as it takes them.

    A resumed run removes lines that the ledger does not have, because their steps will be repeated. It takes missing
    and different lines from the ledger, which lacks only the time of an evaluation. A file with damaged lines is kept
    as metrics.damaged.jsonl.

    Args:
        path: The file.
        version: Last step that the run will not repeat.
        ledger: The run's decisions.

    Raises:
        PreconditionFailed: STORAGE_FAILED: the file cannot be written.
    """

    def __init__(self, path: Path, version: int, ledger: Ledger):
        with writing(path):
            found = _read(path)
            lines = {place: _as_recorded(found.get(place), line) for place, line in _recorded(ledger)}
            partial = path.with_suffix(".partial")
            partial.write_text("".join(f"{lines[place]}\n" for place in sorted(lines) if place[0] <= version))
            partial.rename(path)
            self._file, self._waiting = path.open("ab", buffering=0), b""

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._waiting += (json.dumps({"step": version, **metrics}) + "\n").encode()
        self._write()

    evaluation = step

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        """Writes the waiting lines. If the disk takes only a part, nothing is written and all are tried again later."""
        begin, left = self._file.tell(), self._waiting
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(begin)
            raise
        self._waiting = b""


def _recorded(ledger: Ledger) -> Iterator[tuple[_Place, str]]:
    for kind in (Kind.FINISHED, Kind.EVALUATED):
        for row in ledger.all(kind):
            version = row.pop("version")
            yield (version, kind is Kind.EVALUATED), json.dumps({"step": version, **row})


def _as_recorded(line: str | None, recorded: str) -> str:
    """Returns `line` if it has all numbers of `recorded`, else `recorded`. Compares text, as numbers may be NaN."""
    if line is None:
        return recorded
    numbers = json.loads(line)
    is_same = all(json.dumps(numbers.get(name)) == json.dumps(value) for name, value in json.loads(recorded).items())
    return line if is_same else recorded


def _read(path: Path) -> dict[_Place, str]:
    """Returns the whole lines of `path` by place. A crash may have cut off the last line, which is left out."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    lines: dict[_Place, str] = {}
    damaged: list[int] = []
    for number, line in enumerate(whole, 1):
        try:
            metrics = json.loads(line.decode())
            lines[int(metrics["step"]), "time/step_s" not in metrics] = line.decode()
        except (ValueError, KeyError, TypeError):
            damaged.append(number)
    if damaged:
        copy = path.with_name("metrics.damaged.jsonl")
        path.rename(copy)
        numbers = ", ".join(map(str, damaged))
        log.warning(
            "%s: line %s was damaged and is taken from the ledger; the old file is %s", path, numbers, copy.name
        )
    return lines
