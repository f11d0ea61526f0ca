"""Checks that a run's record is possible in the only legal order of actions, for `lockstep verify`."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from services.common.errors import PreconditionFailed, counted
from services.common.rpc.history import line_files
from services.coordinator.runs.database import reading
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reader import METRICS, LedgerReader, LedgerRow, metrics_lines
from services.coordinator.runs.resume import HISTORY
from services.coordinator.verify.calls import CallChecks
from services.coordinator.verify.history import History, ViolationError

_NUM_SHOWN, _MAX_ROUNDS = 12, 4
_HIDDEN = ("config", "versions", "metrics")  # too long for a line


@dataclass(frozen=True)
class Verdict:
    rows: Sequence[LedgerRow]
    """The shortest prefix of the ledger that is illegal; all of it if none is."""
    num_samples: int
    violation: str
    """What is wrong with the last of `rows` or `lines`, or with metrics.jsonl; empty if all is well."""
    num_calls: int = 0
    num_deleted: int = 0
    """Number of batches that the run has deleted to free space, and whose samples nobody can check any more."""
    lines: Sequence[str] = ()
    """The last lines of the history of calls up to the violation, if it is there."""


@dataclass(frozen=True)
class _Written:
    """What a run that goes on has written up to now. Open, so that a file can be read that it deletes meanwhile."""

    calls: Sequence[tuple[Path, BinaryIO, int]]
    """The files of the history of calls, and how many bytes they have."""
    metrics_bytes: int


def _written(run_dir: Path, opened: ExitStack) -> _Written:
    calls = list[tuple[Path, BinaryIO, int]]()
    for path in line_files(run_dir / HISTORY):
        with suppress(FileNotFoundError):  # the oldest is deleted when a new one begins
            file = opened.enter_context(path.open("rb"))
            calls.append((path, file, path.stat().st_size))
    metrics = run_dir / METRICS
    return _Written(calls, metrics.stat().st_size if metrics.is_file() else 0)


def verify(run_dir: Path, note: Callable[[str], None] = lambda _: None) -> Verdict:
    """Checks a run's ledger, the files that it describes and its calls, up to the first violation. Changes nothing.

    `note` gets how far it is, again and again.

    Raises:
        NotFound: `run_dir` holds no run.
        PreconditionFailed: It is an SFT run.
        DataLoss: The ledger is empty, or a part of the record is damaged, so that nobody can say what it was.
    """
    before = ""
    with closing(LedgerReader(run_dir)) as ledger:
        for num_left in reversed(range(_MAX_ROUNDS)):
            with ExitStack() as opened:
                # The run may go on meanwhile: the rows are read next, and have everything that was written before.
                written = _written(run_dir, opened)
                rows = ledger.rows()
                if rows[0].kind == Kind.OPENED and "rollout" not in json.loads(rows[0].body["config"]):
                    raise PreconditionFailed(
                        f"{run_dir} is an SFT run, which samples nothing: there is nothing to verify"
                    )
                verdict = _verify(run_dir, History(run_dir, rows, ledger), rows, written, note)
            if verdict.violation in ("", before) or ledger.num_rows() == len(rows) or not num_left:
                return verdict
            before = verdict.violation  # the run may have gone back, and replaced a file that was read
    raise AssertionError("unreachable")


def _verify(
    run_dir: Path, history: History, rows: Sequence[LedgerRow], written: _Written, note: Callable[[str], None]
) -> Verdict:
    for number, row in enumerate(rows, 1):
        note(f"row {number:,} of {len(rows):,}")
        try:
            # What is not as it was written raises DataLoss: it is damage, and says nothing about the order.
            with reading(f"{run_dir}: row {row.seq} of the ledger, {row.kind}, or what it describes,"):
                history.follow(row)
        except ViolationError as error:
            return Verdict(rows[:number], history.samples.num_samples, str(error))
    num_samples, calls = history.samples.num_samples, CallChecks(rows, history.samples.facts)
    shown = deque[str](maxlen=_NUM_SHOWN)
    try:
        _follow_calls(calls, written, shown, note)
    except ViolationError as error:
        return Verdict(rows, num_samples, str(error), calls.num_calls, lines=tuple(shown))
    violation = next(_wrong_lines(run_dir / METRICS, rows, written.metrics_bytes), "")
    return Verdict(rows, num_samples, violation, calls.num_calls, history.num_deleted)


def _follow_calls(calls: CallChecks, written: _Written, shown: deque[str], note: Callable[[str], None]) -> None:
    """Checks the history of calls. The last line of a killed coordinator may be torn."""
    for path, file, num_bytes in written.calls:
        note(f"calls in {path.name}")
        for number, text in enumerate(file.read(num_bytes).split(b"\n")[:-1], 1):
            shown.append(f"{path.name}:{number}  {text.decode(errors='replace')}")
            with reading(f"line {number} of {path}"):
                calls.follow(json.loads(text))


def _wrong_lines(path: Path, rows: Sequence[LedgerRow], num_bytes: int) -> Iterator[str]:
    """Yields a sentence for every line of a step, in the first bytes of the file, that contradicts the ledger.

    Lines may be missing, because a full disk does not end a run, and the line of a step is written before its row. The
    last line of a killed coordinator may be torn.
    """
    recorded = {row.required_version: row.body for row in rows if row.kind == Kind.FINISHED}
    evaluations = {row.required_version: row.body for row in rows if row.kind == Kind.EVALUATED}
    newest = next((row.required_version for row in reversed(rows) if row.kind in (Kind.FINISHED, Kind.BEGUN)), 0)
    before = 0
    for number, line in enumerate(metrics_lines(path, num_bytes=num_bytes), 1):
        place, step, metrics = f"line {number} of {path.name}", line.step, line.metrics
        if not line.is_step:  # the time of an evaluation is in this line only
            evaluated = evaluations.get(step, {})
            if any(_text({name: metrics.get(name)}) != _text({name: value}) for name, value in evaluated.items()):
                yield f"{place}, of the evaluation of step {step}, is not what the ledger has"
            continue
        if step <= before:
            yield f"{place} is of step {step} and comes after that of step {before}"
        if step > newest + 1 or (step <= newest and _text(metrics) != _text(recorded.get(step))):
            yield f"{place}, of step {step}, is not what the ledger has of this step"
        before = step


def _text(metrics: Mapping[str, object] | None) -> str:
    """Returns text that is equal for equal metrics, including NaN."""
    return json.dumps(metrics, sort_keys=True)


def show_verdict(verdict: Verdict, run_dir: Path, console: Console) -> None:
    kinds = [row.kind for row in verdict.rows]
    finished = {row.version for row in verdict.rows if row.kind == Kind.FINISHED}  # some may have been done twice
    counts = f"{counted(kinds.count(Kind.OPENED), 'session')}, {counted(len(finished), 'finished step')}"
    if not verdict.violation:
        checked = f"{counted(verdict.num_samples, 'sample')}, {counted(verdict.num_calls, 'call')}"
        num_deleted = verdict.num_deleted
        deleted = f"; the batches of {counted(num_deleted, 'step')} were deleted" if num_deleted else ""
        line = f"{run_dir}: {counted(len(kinds), 'row')}, {counts}, {checked}: no violation{deleted}"
        console.print(line, soft_wrap=True, highlight=False)
        return
    if verdict.lines:
        for text in (*verdict.lines, f"violation after {counted(verdict.num_calls, 'call')}: {verdict.violation}"):
            console.print(text, soft_wrap=True, highlight=False)
        return
    shown = verdict.rows[-_NUM_SHOWN:]
    if len(shown) < len(kinds):
        console.print(f"... {counted(len(kinds) - len(shown), 'row')} before", highlight=False)
    for row in shown:
        body = {name: value for name, value in row.body.items() if name not in _HIDDEN and not isinstance(value, float)}
        version = "" if row.version is None else f" {row.version}"
        text = f"{row.seq:>6}  {row.kind}{version}  {json.dumps(body)}"
        console.print(text, soft_wrap=True, highlight=False)
    console.print(f"violation after {counted(len(kinds), 'row')}: {verdict.violation}", soft_wrap=True, highlight=False)
