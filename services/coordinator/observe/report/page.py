"""Assembles the page: one HTML file with its data, style and script. Its security policy forbids loading anything."""

import base64
import hashlib
import html
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from string import Template

from services.common.errors import InvalidInput, LockstepError, NotFound, counted
from services.common.files import write_whole
from services.common.json_values import JsonObject
from services.coordinator.data.prompts import MODEL_CARD
from services.coordinator.observe import report
from services.coordinator.observe.report import curves, samples, summary
from services.coordinator.observe.report.curves import Row, number, steps_of, thin
from services.coordinator.runs.clock import LANES
from services.coordinator.runs.database import reading
from services.coordinator.runs.reader import METRICS, LedgerReader
from services.coordinator.text.tokenizer import Tokenizer

# Match log lines of common.rpc.server and of the coordinator's reward and rollout clients, written as text or JSON.
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* \w (?:\w+ )?services\.\S+: (.*)")
_FAILURES = {
    re.compile(r"/lockstep\.\S+/(?P<where>\w+): (?P<reason>[A-Z_]+) (?P<text>.*)"): "{where} of {process}",
    re.compile(r"prompt \S+: scorer (?P<where>.+?): (?P<reason>[A-Z_]+): (?P<text>.*)"): "scorer {where}",
    re.compile(r"prompt \S+ sample \d+: environment: (?P<reason>[a-z_]+): (?P<text>.*)"): "environment",
    re.compile(r"lost replica (?P<where>\S+): (?P<text>.*)"): "replica {where}",
}
_DROPPED = "sampling/dropped_"
# Metric -> reason and explanation.
_WARNINGS = {
    "warning/entropy_collapse": ("ENTROPY_COLLAPSE", "entropy is below observability.warnings.entropy_ratio"),
    "warning/learning_rate_is_0": ("LEARNING_RATE_IS_0", "trainer.optim.decay_steps have passed: nothing was learned"),
    "warning/steps_without_mixed_group": ("NO_MIXED_GROUP", "no group had different rewards: nothing was learned"),
}
_MAX_TEXT = 400


@dataclass
class Failure:
    """One kind of failure: how often it occurred, when it last did, and its last message."""

    what: str
    reason: str
    count: int
    last: str
    text: str


def failures(run_dir: Path, steps: Sequence[Row]) -> list[Failure]:
    """Returns refused calls, samples without a score, failed episodes, lost replicas, dropped groups and warnings about
    steps from which little was learned, most frequent first.
    """
    kinds: dict[tuple[str, str], Failure] = {}
    for failure in (*_logged(run_dir), *_of_steps(steps)):
        before = kinds.get((failure.what, failure.reason))
        failure.count += before.count if before else 0
        kinds[failure.what, failure.reason] = failure
    return sorted(kinds.values(), key=lambda failure: -failure.count)


def _logged(run_dir: Path) -> Iterator[Failure]:
    for path in sorted(path for path in (run_dir / "logs").glob("*.log") if path.is_file()):  # no pipe, which may hang
        # A killed process may have cut a character.
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from filter(None, (_failure(path.stem, *_read(line)) for line in lines))


def _read(line: str) -> tuple[str, str]:
    """Returns the time and message of a log line; two empty strings if it is not one of Lockstep's."""
    if not line.startswith("{"):
        match = _LINE.match(line)
        return (match[1], match[2]) if match else ("", "")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "", ""
    return str(record.get("time", ""))[:19].replace("T", " "), str(record.get("message", ""))


def _failure(process: str, time: str, message: str) -> Failure | None:
    for pattern, what in _FAILURES.items():
        if match := pattern.match(message):
            parts = {"reason": "LOST"} | match.groupdict()
            text = parts["text"][:_MAX_TEXT]
            return Failure(what.format(process=process, **parts), parts["reason"].upper(), 1, time, text)
    return None


def _of_steps(steps: Sequence[Row]) -> Iterator[Failure]:
    """Yields dropped groups, and steps with a warning."""
    for row in steps:
        for name in (name for name in row if name.startswith(_DROPPED) and row[name]):
            reason = name.removeprefix(_DROPPED).upper()
            yield Failure("prompt groups dropped", reason, int(row[name]), f"step {row['step']}", "")
    for row in steps:
        for name, (reason, text) in _WARNINGS.items():
            if row.get(name):
                yield Failure("step", reason, 1, f"step {row['step']}", text)


def lanes(rows: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """Returns each step that has lanes: `step`, its `seconds`, and `lanes` of name, begin, end and busy seconds.

    All steps have the same lanes. A lane that was idle for a whole step has zeros, such as that of the replicas in the
    last steps of a run with a lag.
    """
    steps = [row for row in thin(steps_of(rows)) if "time/generate_end_s" in row or "time/train_end_s" in row]
    names = [name for name in LANES if any(f"time/{name}_end_s" in row for row in steps)]

    def seconds(row: Row, name: str) -> list[float | str]:
        return [number(row.get(f"time/{name}_{part}_s", 0.0)) for part in ("begin", "end", "busy")]

    return [
        {
            "step": row["step"],
            "seconds": number(row["time/step_s"]),
            "lanes": [(name, *seconds(row, name)) for name in names],
        }
        for row in steps
    ]


_MAX_EPISODES, _MAX_CHARACTERS = 20, 20_000


def failed_episodes(run_dir: Path) -> tuple[list[JsonObject], list[str]]:
    """Returns the newest samples whose agent failed, newest first, and notes about what the page leaves out.

    Each has its `prompt`, `sample`, `failure` and `detail`, and `messages` of label, text and whether the policy wrote
    it. Of a sample that was played again, the last attempt is shown.
    """
    paths = [path for path in (run_dir / "failed_episodes").glob("*.jsonl") if path.is_file()]
    paths.sort(key=lambda path: (path.stat().st_mtime, path), reverse=True)
    of_sample = dict[str, Path]()
    for path in paths:
        of_sample.setdefault(path.stem.rpartition("-")[0], path)
    newest = [*of_sample.values()][:_MAX_EPISODES]
    shown, damaged = list[JsonObject](), list[str]()
    for path in newest:
        try:
            shown.append(_failed_episode(path))
        except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
            damaged.append(path.name)
    notes = [f"Not shown, because they are damaged: {', '.join(damaged)}."] if damaged else []
    if len(of_sample) > len(newest):
        notes.append(
            f"Failed agents: the newest {len(newest)} of {len(of_sample)} samples in failed_episodes/ are shown."
        )
    return shown, notes


def _failed_episode(path: Path) -> JsonObject:
    """Reads the calls of an agent that failed, of which the last ones say most."""
    kept, num_characters, num_left = deque[tuple[str, str, bool]](), 0, 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        head = json.loads(next(lines, ""))
        for message in chain.from_iterable(map(_messages, map(json.loads, lines))):
            kept.append(message)
            num_characters += len(message[1])
            while num_characters > _MAX_CHARACTERS and len(kept) > 1:
                num_characters -= len(kept.popleft()[1])
                num_left += 1
    if num_left:
        kept.appendleft((f"{counted(num_left, 'earlier message')} left out", "", False))
    prompt, sample, _ = head["episode"].rsplit("/", 2)
    facts = {"prompt": prompt, "sample": sample, "failure": str(head["failure"])}
    return {**facts, "detail": samples.cut(str(head["detail"])), "messages": [*kept]}


def _messages(call: JsonObject) -> Iterator[tuple[str, str, bool]]:
    """Yields the messages that a call adds, and its answer or, without one, its status."""
    which, before = f"call {call['call']}", call.get("continues")
    which += "" if before is None else f", which continues call {before}"
    for message in call["messages"]:
        yield f"{which} · {message['role']}", _text(message), False
    answer = call.get("answer")
    yield f"{which} · {call['status']}", _text(answer) if answer else "", bool(answer)


def _text(message: JsonObject) -> str:
    """Returns the content of a message, then whatever else it has, such as calls of tools, as JSON."""
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    content = message.get("content") or ""
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
    return samples.cut("\n".join(filter(None, [*parts, json.dumps(others, ensure_ascii=False) if others else ""])))


_SCRIPTS = ("draw.js", "plots.js", "lanes.js", "samples.js", "page.js")


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the page of a run, which may still be running, to `out` or to report.html in its directory.

    Returns:
        The path of the page.

    Raises:
        NotFound: `run_dir` holds no run, or the directory of `out` does not exist.
        InvalidInput: `out` is a directory; or there is no `out`, and report.html is a link or no regular file.
        DataLoss: The ledger is damaged.
    """
    path = out or run_dir / "report.html"
    if out and not out.parent.is_dir():
        raise NotFound(f"--out: {out.parent} does not exist", field="out")
    if path.is_dir():
        raise InvalidInput(f"--out: {path} is a directory; name a file, such as {path / 'report.html'}", field="out")
    if not out and (path.is_symlink() or (path.exists() and not path.is_file())):
        # Through a link, the owner of the run could have any file of this user overwritten.
        raise InvalidInput(f"{path} is not a regular file: remove it, or name another file with --out", field="out")
    write_whole(path, render(gather(run_dir)))
    return path


def gather(run_dir: Path) -> dict[str, object]:
    with closing(LedgerReader(run_dir)) as ledger:
        rows, notes = curves.read_metrics(run_dir / METRICS, ledger)
        data = summary.head(run_dir, ledger, rows)
        found = samples.sources(run_dir)
        sources = samples.of_run(found, ledger)
    decode, note = _decoder(run_dir, data["facts"])
    if num_left := len(found) - len(sources):
        files_left = counted(num_left, "file")
        notes.append(f"Not shown: {files_left} of samples of later steps, which the run has left by going back.")
    if damaged := samples.unreadable(sources):
        notes.append(f"Not shown, because they are damaged: {', '.join(damaged)}.")
        sources = [source for source in sources if source.path.name not in damaged]
    shown, left_out = samples.embed(sources, decode)
    if scorers := dict.fromkeys(source["scorer"] for source in shown):
        data["facts"].append(("scorer", "; ".join(scorers)))
    steps = steps_of(rows)
    if len(steps) > curves.MAX_STEPS:
        notes.append(f"Curves show {len(thin(steps)):,} of {len(steps):,} steps, evenly spaced.")
    with reading(f"{run_dir}: a number of a step"):
        failed = [asdict(failure) for failure in failures(run_dir, steps)]
    episodes, notes_of_episodes = failed_episodes(run_dir)
    return {
        **data,
        "panels": curves.panels(rows),
        "timeline": curves.phases(rows),
        "lanes": lanes(rows),
        "histogram": samples.histogram(sources),
        "samples": shown,
        "failures": failed,
        "failedEpisodes": episodes,
        "notes": [*note, *notes, *notes_of_episodes, *_left_out(shown, left_out)],
    }


def render(data: Mapping[str, object]) -> str:
    folder = files(report)
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n{{\n{script}\n}}\n'
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(str(data["name"])),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=samples.to_json(data),
    )


def _hash(text: str) -> str:
    """Returns the hash of a text in the form that a Content-Security-Policy uses to allow it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _decoder(run_dir: Path, known: Sequence[tuple[str, str]]) -> tuple[samples.Decode, list[str]]:
    """Returns a function from tokens to text; if this host has no tokenizer, one to token ids and a note about it."""
    places = [run_dir / "model", run_dir / MODEL_CARD, Path(dict(known)["model"])]
    errors = []
    for place in places:
        try:
            return partial(Tokenizer.load(place).decode, skip_special_tokens=False), []
        except LockstepError as error:
            errors.append(error.message)
    note = f"Samples are shown as token ids because no tokenizer was found: {errors[-1]}."
    return lambda tokens: " ".join(map(str, tokens)), [note]


def _left_out(shown: Sequence[samples.Shown], left_out: Sequence[samples.Source]) -> list[str]:
    notes = []
    total, embedded = sum(one["total"] for one in shown), sum(len(one["columns"]["group"]) for one in shown)
    if embedded < total:
        notes.append(f"The table has {embedded:,} of the {total:,} samples of its steps, as whole prompt groups.")
    if left_out:
        num_shown, num = len(shown), len(shown) + len(left_out)
        notes.append(f"The table has samples of {num_shown:,} of {num:,} steps and evaluations, spread over the run.")
    return [f"{note} The run's Parquet files have all samples." for note in notes]
