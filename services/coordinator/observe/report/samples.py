"""Collects samples for the page, as many whole prompt groups as fit, and histograms of all rewards."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.common.batches import begins_of_samples, is_of_samples
from services.common.json_values import JsonObject
from services.coordinator.data.groups import conversation_of
from services.coordinator.data.reading.parquet import Record
from services.coordinator.observe.report.curves import number, thin
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reader import LedgerReader

Decode = Callable[[Sequence[int]], str]

MAX_BYTES = 8_000_000
"""Limit for all embedded samples together, as JSON."""
_MIN_SOURCES = 16
_EVALUATIONS_SHARE = 0.25
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 10_000, 4_000
_MAX_VALUES, _NUM_BINS = 12, 24
_NAME = re.compile(r"(?:(?P<set>.+)-)?step-(?P<version>\d+)\.parquet")


@dataclass(frozen=True)
class Source:
    """A Parquet file of samples: the batch of a step, or an evaluation of a held-out set after a step."""

    path: Path
    step: int
    held_out: str = ""

    @property
    def label(self) -> str:
        return f"held-out {self.held_out} after step {self.step}" if self.held_out else f"step {self.step}"


Shown = JsonObject
"""Samples of a source, as `_rows` returns them."""


def sources(run_dir: Path) -> list[Source]:
    """Returns all files of samples, ordered by step. The batch sampled from version v belongs to step v + 1."""
    found = []
    for path in (*(run_dir / "batches").glob("*.parquet"), *(run_dir / "evaluations").glob("*.parquet")):
        if (name := _NAME.fullmatch(path.name)) and path.is_file():  # no pipe, which would hang
            held_out = name["set"] or ""
            found.append(Source(path, int(name["version"]) + (not held_out), held_out))
    return sorted(found, key=lambda source: (source.step, source.held_out))


def of_run(found: Sequence[Source], ledger: LedgerReader) -> list[Source]:
    """Returns those of `found` that belong to what the run has trained, or that it trains on next.

    The others are of steps after a checkpoint to which the run went back, unless it has come to them again.
    """
    finished, opened = ledger.last_finished(), ledger.opening_shown()
    if finished is None or opened is None:
        return [*found]
    num_steps = json.loads(opened["config"])["num_steps"]

    def is_of_run(source: Source) -> bool:
        if source.step <= finished:
            return not source.held_out or _is_current(source.step, ledger)
        return not source.held_out and source.step <= num_steps and _is_next(source.step - 1, finished, ledger)

    return [source for source in found if is_of_run(source)]


def _is_current(version: int, ledger: LedgerReader) -> bool:
    """Returns whether `version` was evaluated, or is being evaluated, since its step was last finished."""
    return any(ledger.is_newer(kind, Kind.FINISHED, version) for kind in (Kind.EVAL_SAMPLES, Kind.EVALUATED))


def _is_next(version: int, finished: int, ledger: LedgerReader) -> bool:
    """Returns whether the run will train on the batch for `version`: it is of weights that the run has published."""
    collected = ledger.last(Kind.COLLECTED, version)
    if collected is None:  # its file was just written
        return True
    drawn = collected.get("drawn", version)
    published = ledger.last(Kind.PUBLISHED, drawn)
    return drawn <= finished and published is not None and published["digest"] == collected["digest"]


def embed(
    all_sources: Sequence[Source], decode: Decode, max_bytes: int = MAX_BYTES
) -> tuple[list[Shown], list[Source]]:
    """Returns the samples that the page shows, in the order of `all_sources`, and the sources that did not fit.

    Tries the newest source first, then the oldest, then those halfway between, so that what fits is spread over the
    run.
    """
    batches = [source for source in all_sources if not source.held_out]
    evaluations = [source for source in all_sources if source.held_out]
    held_out = _EVALUATIONS_SHARE if batches and evaluations else float(bool(evaluations))
    shown: dict[Source, Shown] = {}
    for some, share in ((batches, 1 - held_out), (evaluations, held_out)):
        left = int(max_bytes * share)
        most = left // max(1, min(len(some), _MIN_SOURCES))
        for source in _ends_then_middles(some):
            if (table := _read(source)) is None:
                continue
            samples, num_bytes = _fit(source, table, decode, most)
            if (left := left - num_bytes) < 0:
                break
            shown[source] = samples
    return [shown[source] for source in all_sources if source in shown], [s for s in all_sources if s not in shown]


def histogram(all_sources: Sequence[Source]) -> dict[str, object]:
    """Returns the histogram of each batch's rewards: `labels` of the bins, and `counts` by step."""
    of_steps = thin([source for source in all_sources if not source.held_out])
    batches = [(source, _read(source, ["group", "sample", "segment", "reward"])) for source in of_steps]
    rewards = {
        source.step: table["reward"].to_numpy()[begins_of_samples(table)]
        for source, table in batches
        if table is not None
    }
    if not rewards:
        return {"labels": [], "counts": {}}
    every = np.concatenate(list(rewards.values()))
    values = np.unique(every)
    if len(values) <= _MAX_VALUES:
        labels = [f"{value:g}" for value in values]
        counts = {step: [int((some == value).sum()) for value in values] for step, some in rewards.items()}
        return {"labels": labels, "counts": counts}
    finite = every[np.isfinite(every)]  # there are some: more than a few values differ
    edges = np.linspace(finite.min(), finite.max(), _NUM_BINS + 1)
    labels = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    return {"labels": labels, "counts": {step: np.histogram(some, edges)[0].tolist() for step, some in rewards.items()}}


def _ends_then_middles(some: Sequence[Source]) -> Iterator[Source]:
    """Yields the last source, the first, then repeatedly the middles of all remaining gaps."""
    if some:
        yield some[-1]
    if len(some) > 1:
        yield some[0]
    gaps = [(0, len(some) - 1)]
    while gaps := [gap for gap in gaps if gap[1] - gap[0] > 1]:
        middles = [(low + high) // 2 for low, high in gaps]
        yield from (some[middle] for middle in middles)
        halves = zip(gaps, middles, strict=True)
        gaps = [half for (low, high), middle in halves for half in ((low, middle), (middle, high))]


def unreadable(all_sources: Sequence[Source]) -> list[str]:
    """Returns the names of the files that are no Parquet files of samples, as a full disk or a broken copy may leave
    them."""
    return [source.path.name for source in all_sources if not _is_whole(source.path)]


def _is_whole(path: Path) -> bool:
    """Returns whether a file ends as Parquet does; reads no samples, because a run may have thousands of files."""
    try:
        return is_of_samples(pq.read_schema(path))
    except (pa.ArrowException, OSError):
        return False


def _read(source: Source, columns: Sequence[str] | None = None) -> pa.Table | None:
    """Returns the samples of a file; None if it is damaged."""
    try:
        return pq.read_table(source.path, columns=columns)
    except (pa.ArrowException, OSError):
        return None


def _fit(source: Source, table: pa.Table, decode: Decode, max_bytes: int) -> tuple[Shown, int]:
    """Returns a source's samples and their size in bytes, with every k-th prompt group so that they fit."""
    groups = np.unique(table["group"].to_numpy())
    # A first guess: tokens and numbers take over 8 times the bytes of their text.
    every = max(1, table.nbytes // (8 * max_bytes))
    while True:
        samples = _rows(source, table, groups[::every], decode)
        num_bytes = len(to_json(samples).encode())
        if num_bytes <= max_bytes or every >= len(groups):
            return samples, num_bytes
        every = max(every + 1, math.ceil(every * num_bytes / max_bytes))


def _rows(source: Source, table: pa.Table, groups: np.ndarray, decode: Decode) -> Shown:
    """Returns the samples of some groups; each of `columns` has one value per sample."""
    chosen = table.filter(pc.is_in(table["group"], value_set=pa.array(groups, table.schema.field("group").type)))
    samples = [list(rows) for _, rows in groupby(chosen.to_pylist(), lambda row: (row["group"], row["sample"]))]
    ends, rows = _final_texts(source), [segments[0] for segments in samples]
    components = list(dict.fromkeys(name for row in rows for name, _ in row["components"]))
    stamps = list(dict.fromkeys((row["policy_version"], row["policy_digest"]) for row in rows))
    prompts = {row["group"]: row for row in rows}
    return {
        "label": source.label,
        "step": source.step,
        "heldOut": bool(source.held_out),
        "total": len(begins_of_samples(table)),
        "scorer": ", ".join(dict.fromkeys(row["scorer"] for row in rows)),
        "components": components,
        "stamps": stamps,
        "prompts": {
            group: (row["prompt_id"], _text(row["prompt_tokens"], decode), _answer(row))
            for group, row in prompts.items()
        },
        "columns": {
            "group": [row["group"] for row in rows],
            "sample": [row["sample"] for row in rows],
            "reward": [number(row["reward"]) for row in rows],
            "components": [
                [number(values.get(name, math.nan)) for name in components]
                for values in (dict(row["components"]) for row in rows)
            ],
            "advantage": [_advantage(segments) for segments in samples],
            "stop": [row["finish_reason"] for row in rows],
            "tokens": [sum(len(row["tokens"]) for row in segments) for segments in samples],
            "completion": ["\n".join(_text(row["tokens"], decode) for row in segments) for segments in samples],
            "turns": [_parts(segments, ends, decode) for segments in samples],
            "stamp": [stamps.index((row["policy_version"], row["policy_digest"])) for row in rows],
        },
    }


def _answer(row: Record) -> str | None:
    answer = row.get("answer")  # files of earlier releases have none, and damaged ones may have anything
    return cut(answer) if isinstance(answer, str) else None


def _advantage(segments: Sequence[Record]) -> float | str | None:
    advantages = list(itertools.chain(*(row["advantages"] or () for row in segments)))
    return number(float(np.mean(advantages))) if advantages else None


_Part = tuple[str, float | str | None] | tuple[str, float | None, str, int]
"""A text with the reward of the turn, None if the environment wrote it; of an agent's call also label and depth."""


def _parts(segments: Sequence[Record], ends: Mapping[tuple[int, int], _Part], decode: Decode) -> list[_Part] | None:
    """Returns an episode as texts in order; None if there was no environment."""
    row = segments[0]
    if row["environment"] is None:
        return None
    if row.get("calls") is not None:
        end = ends.get((row["group"], row["sample"]))
        return [*_calls(segments, decode), *([end] if end else [])]
    conversation = conversation_of(row, lambda tokens: _text(tokens, decode))
    return [(part.text, number(part.reward) if part.HasField("reward") else None) for part in conversation.parts]


def _calls(segments: Sequence[Record], decode: Decode) -> Iterator[_Part]:
    """Yields the calls of an agent's episode as a tree: the text that a call adds to the one that it continues, and its
    answer. The first call that continues another one follows it, others are below it.
    """
    texts: dict[int, tuple[str, str]] = {}
    trained: dict[int, int] = {}
    children: dict[int | None, dict[int, None]] = {}
    for row in segments:
        turns = zip(row["calls"], row["turn_begins"], row["turn_ends"], strict=True)
        for (call, begin, end), before in zip(turns, (None, *row["turn_ends"]), strict=False):
            added = row["prompt_tokens"] if before is None else row["tokens"][before:begin]
            texts.setdefault(call["number"], (_text(added, decode), _text(row["tokens"][begin:end], decode)))
            children.setdefault(call["parent"], {})[call["number"]] = None
            if any(row["loss_mask"][begin:end]):
                trained[call["number"]] = row["segment"]
    stack = [(root, None, 0) for root in reversed(children.pop(None, {}))]
    while stack:
        called, parent, depth = stack.pop()
        where = f"call {called}" if parent is None else f"call {called}, which continues call {parent}"
        fate = f"trained in segment {trained[called]}" if called in trained else "not trained"
        added, answer = texts[called]
        yield from ((added, None, f"agent · {where}", depth), (answer, 0.0, f"policy · {fate}", depth))
        first, *others = children.get(called, {None: None})
        if first is not None:
            stack += [(first, called, depth), *((other, called, depth + 1) for other in reversed(others))]


def _final_texts(source: Source) -> dict[tuple[int, int], _Part]:
    path = source.path.with_suffix(".calls.parquet")
    table = _read(replace(source, path=path), ["group", "sample", "text", "exit_code"]) if path.is_file() else None
    return {
        (one["group"], one["sample"]): (cut(one["text"]), None, f"agent · final text, exit code {one['exit_code']}", 0)
        for one in (table.to_pylist() if table else ())
    }


def _text(tokens: Sequence[int], decode: Decode) -> str:
    return cut(decode(tokens))


def cut(text: str) -> str:
    left_out = len(text) - _HEAD_CHARACTERS - _TAIL_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:_HEAD_CHARACTERS]}\n[… {left_out:,} characters left out …]\n{text[-_TAIL_CHARACTERS:]}"


def to_json(value: object) -> str:
    """Returns JSON that is safe inside HTML: no tag or comment can begin in it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
