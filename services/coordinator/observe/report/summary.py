"""Sums up runs: the facts at the top of a report's page, and a table in the terminal that compares several runs.

The table has what their configs differ in, their curves, held-out results and step times.
"""

import datetime
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Column, Table

from services.common.errors import DataLoss, without_passwords
from services.common.json_values import JsonObject
from services.coordinator.observe.console import shortened
from services.coordinator.observe.report import curves
from services.coordinator.observe.report.curves import Row
from services.coordinator.runs.checkpoints import change_between
from services.coordinator.runs.database import reading
from services.coordinator.runs.ledger import Decision, Kind
from services.coordinator.runs.reader import METRICS, LedgerReader, is_running
from services.coordinator.runs.resume import differences, value_of


def head(run_dir: Path, ledger: LedgerReader, rows: Sequence[Row]) -> JsonObject:
    """Returns the `name`, `state` and `config` of a run, and `facts` of label and value.

    Raises:
        DataLoss: A part of the ledger that these are made of is damaged.
    """
    with reading(f"{run_dir}: the config or a number in the ledger"):
        return _head(run_dir, ledger, rows)


def _head(run_dir: Path, ledger: LedgerReader, rows: Sequence[Row]) -> JsonObject:
    opened = ledger.opening_shown()
    if opened is None:
        raise DataLoss(f"{run_dir}: the ledger has no row that opened the run")
    config = json.loads(opened["config"])
    version = int(max((row["step"] for row in rows), default=0))
    num_steps = config["num_steps"]  # None if the length is set in epochs
    sessions = _sessions(ledger)
    began, duration_s = sessions[0][0], sum(end - begin for begin, end in sessions)
    failed, stopped = ledger.failure(), ledger.last(Kind.STOPPED, version)
    versions = ", ".join(f"{name} {number}" for name, number in opened.get("versions", {}).items())
    facts = {
        "run": opened["run_id"],
        "model": str(config["model"]),
        "steps": f"{version:,} of {num_steps:,}" if num_steps else f"{version:,}",
        "began": f"{datetime.datetime.fromtimestamp(began, datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "duration": _duration(duration_s) + (f" in {len(sessions)} sessions" if len(sessions) > 1 else ""),
        "held-out": _held_out(ledger),
        "early stopping": "",
        "error": f"{failed['reason']}: {failed['message'].partition(chr(10))[0]}" if failed else "",
        "seed": str(config.get("seed", "")),
        "config digest": hashlib.sha256(opened["config"].encode()).hexdigest(),
        "data digest": (ledger.last(Kind.COLLECTED) or {}).get("dataset", ""),
        "versions": versions or "not recorded",
    }
    if stopped:
        best = f"after step {stopped['best_version']}, with {stopped['best_value']:.3g}"
        facts["early stopping"] = f"{stopped['metric']} was best {best}"
    return {
        "name": str(config["name"]),
        "state": "running" if is_running(run_dir) else "failed" if failed else _end(version, num_steps, stopped),
        "facts": [(label, value) for label, value in facts.items() if value],
        "config": without_passwords(json.dumps(config, indent=1, ensure_ascii=False)),
    }


def _end(version: int, num_steps: int | None, stopped: Decision | None) -> str:
    if num_steps is None:
        return "ended"
    return "done" if version >= num_steps or stopped else "stopped"


def _sessions(ledger: LedgerReader) -> list[tuple[float, float]]:
    """Returns the times of the first and last decision of each session, in seconds since 1970.

    A session is one opening of the run by a coordinator.
    """
    sessions: list[tuple[float, float]] = []
    for time_s, kind in ledger.times():
        begin = time_s if kind == Kind.OPENED or not sessions else sessions.pop()[0]
        sessions.append((begin, max(begin, time_s)))  # the clock may have been set back
    return sessions


def _held_out(ledger: LedgerReader) -> str:
    """Returns the first and last reward, or loss, of the first held-out set as text."""
    evaluations = ledger.evaluations()
    names = [name for name in (evaluations[0] if evaluations else {}) if name.endswith(("/reward", "/nll"))]
    if not names:
        return ""
    first, last = evaluations[0], evaluations[-1]
    text = f"{_without_prefix(names[0])} {first[names[0]]:.3f}"
    text += f" → {last.get(names[0], math.nan):.3f}" if len(evaluations) > 1 else ""
    change = change_between(ledger, first["version"], last["version"])
    return text + (f", not to be compared: {change}" if change else "")


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


_NOT_COMPARED = {"name", "runs_dir", "resume"}
_FACTS = ("steps", "duration", "early stopping", "error")
_CURVES = {
    "reward": "reward/mean",
    "loss": "train/loss",
    "entropy": "train/entropy",
    "length": "completion/tokens_mean",
}
_TIMES = {
    "step s": "time/step_s",
    "generate s": "time/generate_busy_s",
    "score s": "time/score_busy_s",
    "train s": "time/training_s",
    "publish s": "time/publishing_s",
    "tokens/s": "time/tokens_per_s",
}
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_CHARS = 16
_MAX_VALUE = 40
_Series = list[tuple[float, float]]
"""Steps and values."""
_Rows = dict[str, list[str]]
"""Cells of each run by the row's name."""


@dataclass(frozen=True)
class _Compared:
    head: JsonObject
    config: Mapping[str, object]
    rows: Sequence[Row]

    def series(self, metric: str) -> _Series:
        return [(row["step"], row[metric]) for row in self.rows if metric in row]


def show_comparison(run_dirs: Sequence[Path], console: Console) -> None:
    runs = [_read(directory) for directory in run_dirs]
    names = [run.head["name"] for run in runs]
    titles = ("", *(names if len({*names}) == len(names) else map(str, run_dirs)))
    # Folded, because rows and runs whose long names are cut off could not be told apart.
    table = Table(*(Column(title, overflow="fold") for title in titles), expand=False)
    sections = (_progress(runs), _config(runs), _curves(runs), _last_held_out(runs), _times(runs))
    for rows in filter(None, sections):
        for name, cells in rows.items():
            table.add_row(name, *cells)
        table.add_section()
    console.print(table)
    what = "curves: over the steps of the longest run, from the lowest to the highest value of all"
    console.print(what, soft_wrap=True)


def _read(directory: Path) -> _Compared:
    with closing(LedgerReader(directory)) as ledger:
        rows, _ = curves.read_metrics(directory / METRICS, ledger)
        about = head(directory, ledger, rows)
    return _Compared(about, json.loads(about["config"]), rows)


def _progress(runs: Sequence[_Compared]) -> _Rows:
    facts = [dict(run.head["facts"]) for run in runs]
    rows = {name: [of_run.get(name, "") for of_run in facts] for name in _FACTS}
    rows["error"] = [shortened(error, _MAX_VALUE) for error in rows["error"]]  # the run's own page has all of it
    return {"state": [run.head["state"] for run in runs]} | {name: cells for name, cells in rows.items() if any(cells)}


def _config(runs: Sequence[_Compared]) -> _Rows:
    changed = dict.fromkeys(key for run in runs[1:] for key in differences(run.config, runs[0].config))
    return {key: _values(runs, key) for key in changed if key not in _NOT_COMPARED}


def _values(runs: Sequence[_Compared], key: str) -> list[str]:
    whole = [json.dumps(value_of(run.config, key), ensure_ascii=False) for run in runs]
    cut = [shortened(text, _MAX_VALUE) for text in whole]
    return cut if len({*cut}) == len({*whole}) else whole


def _curves(runs: Sequence[_Compared]) -> _Rows:
    held_out = (metric for metric in _held_out_metrics(runs) if metric.endswith(("/reward", "/nll")))
    metrics = _CURVES | {f"held-out {_without_prefix(metric)}": metric for metric in held_out}
    return {name: drawn for name, metric in metrics.items() if (drawn := _drawn([run.series(metric) for run in runs]))}


def _drawn(series: Sequence[_Series]) -> list[str]:
    """Returns each series as bars, with its first and last value; all have the same axes. Empty if none has values."""
    finite = [point for one in series for point in one if math.isfinite(point[1])]
    if not finite:
        return []
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    last = max(step for step, _ in finite)
    drawn = []
    for one in series:
        bars = [" "] * _CURVE_CHARS
        for step, value in one:
            place = min(int(step / (last or 1) * _CURVE_CHARS), _CURVE_CHARS - 1)
            height = (value - low) / (high - low) if high > low else 0.0
            bars[place] = _BARS[round(height * (len(_BARS) - 1))] if math.isfinite(value) else "×"
        drawn.append(f"{''.join(bars)} {_rounded(one[0][1], 3)} → {_rounded(one[-1][1], 3)}" if one else "")
    return drawn


def _rounded(value: float, digits: int) -> str:
    """Returns at least `digits` significant digits; a large number without an exponent, which would be hard to read."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _last_held_out(runs: Sequence[_Compared]) -> _Rows:
    last = {metric: [run.series(metric)[-1:] for run in runs] for metric in _held_out_metrics(runs)}
    return {
        f"last {_without_prefix(metric)}": [
            "".join(f"{_rounded(value, 4)} (step {step})" for step, value in points) for points in of_runs
        ]
        for metric, of_runs in last.items()
    }


def _times(runs: Sequence[_Compared]) -> _Rows:
    columns = {name: [[value for _, value in run.series(metric)] for run in runs] for name, metric in _TIMES.items()}
    return {
        f"median {name}": [_rounded(median(values), 4) if values else "" for values in of_runs]
        for name, of_runs in columns.items()
        if any(of_runs)
    }


def _held_out_metrics(runs: Sequence[_Compared]) -> list[str]:
    return sorted({name for run in runs for row in run.rows for name in row if name.startswith("eval/")})


def _without_prefix(metric: str) -> str:
    return metric.removeprefix("eval/")
