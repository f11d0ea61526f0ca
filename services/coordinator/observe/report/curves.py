"""Reads the metrics of a run, and makes the curves and phase times of the report's page from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.common.json_values import JsonObject
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.reader import metrics_lines

Row = Mapping[str, float]
Item = TypeVar("Item")

MAX_STEPS = 2000
"""Maximum number of steps in a curve, about as many as a screen has pixels; longer runs are thinned evenly."""

_NO_COMPONENT = {"reward/mean", "reward/std", "reward/mixed_groups"}


@dataclass(frozen=True)
class _Panel:
    """A plot: title and series (name -> metric). `held_out` adds a series eval/<set>/<held_out> for every set."""

    title: str
    series: Mapping[str, str]
    held_out: str = ""
    is_log: bool = False


_PANELS = (
    _Panel("Reward", {"training": "reward/mean"}, held_out="reward"),
    _Panel("Loss", {"loss": "train/loss"}),
    _Panel("Held-out loss, nats per token", {}, held_out="nll"),
    _Panel("Entropy, nats per token", {"entropy": "train/entropy"}),
    _Panel("Gradient norm", {"norm": "train/grad_norm"}),
    _Panel(
        "Logprob difference, engine to trainer",
        {"mean": "train/logprob_diff_mean", "max": "train/logprob_diff_max"},
        is_log=True,
    ),
    _Panel("Effective sample size, share of tokens", {"of the importance weights": "lag/ess"}),
    _Panel("Lag, versions", {"lag": "lag/versions"}),
    _Panel("Response length, tokens", {"mean": "completion/tokens_mean", "longest": "completion/tokens_max"}),
    _Panel("Tokens per second", {"tokens/s": "time/tokens_per_s"}),
    _Panel("Shares", {"mixed groups": "reward/mixed_groups", "truncated": "completion/truncated"}),
    _Panel("KL to the reference, nats per token", {"k1": "kl/token_mean"}),
    _Panel("KL to the teacher, nats per token", {"sampled": "teacher_kl/token_mean", "top k": "train/distill_kl"}),
    _Panel("Critic: explained variance", {"of the returns": "value/explained_variance"}),
)


def read_metrics(path: Path, ledger: Ledger) -> tuple[list[Row], list[str]]:
    """Reads the steps and evaluations of metrics.jsonl, and takes what it lacks from the ledger.

    Returns:
        The rows in order, and a note about each damaged line.
    """
    damaged: list[int] = []
    rows: dict[tuple[int, bool], Row] = {}
    for line in metrics_lines(path, damaged):
        numbers = {name: value for name, value in line.metrics.items() if isinstance(value, int | float)}
        rows[line.place] = {"step": line.step, **numbers}
    notes = [f"Line {number} of {path.name} is damaged; the ledger has its numbers." for number in damaged]
    finished = ledger.last_finished() or 0
    for is_evaluation, decisions in enumerate((ledger.all(Kind.FINISHED), ledger.evaluations())):
        for version, metrics in ((row.pop("version"), row) for row in decisions):
            if version <= finished:
                rows.setdefault((version, bool(is_evaluation)), {"step": version, **metrics})
    return [rows[place] for place in sorted(rows)], notes


def steps_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "time/step_s" in row]


def thin(rows: Sequence[Item]) -> Sequence[Item]:
    """Returns at most about MAX_STEPS rows, evenly spaced, including the last one."""
    every = math.ceil(len(rows) / MAX_STEPS) if rows else 1
    return rows[(len(rows) - 1) % every :: every]


def panels(rows: Sequence[Row]) -> list[JsonObject]:
    """Returns the plots: `title`, whether the axis is `log`, and `series` of name, steps `x` and values `y`."""
    steps = thin(steps_of(rows))
    made: list[JsonObject] = []
    for panel in (*_PANELS, _components(steps), _by_column(rows), *_learning_rate(steps)):
        series = [_series(name, metric, _rows_with(metric, rows, steps)) for name, metric in panel.series.items()]
        if panel.held_out:
            end = f"/{panel.held_out}"
            metrics = sorted({m for row in rows for m in row if m.startswith("eval/") and m.endswith(end)})
            names = (metric.removeprefix("eval/").removesuffix(end) for metric in metrics)
            series += [_series(name, m, _rows_with(m, rows, steps)) for name, m in zip(names, metrics, strict=True)]
        if series := [one for one in series if one["x"]]:
            made.append({"title": panel.title, "log": panel.is_log, "series": series})
    return made


def phases(rows: Sequence[Row]) -> dict[str, object]:
    """Returns the seconds of each phase in every step: `steps`, and `phases` of name and seconds.

    The phase "other" is the rest of a step. With a lag, generating overlaps with training; only the rest of it counts.
    An evaluation counts in the step that made its weights; the evaluation of the initial weights counts in the first
    step.
    """
    steps = thin(steps_of(rows))
    columns = {phase.value: [row.get(f"time/{phase.value}_s", 0.0) for row in steps] for phase in Phase}
    known = [sum(seconds) for seconds in zip(*columns.values(), strict=True)]
    total = sum(row["time/step_s"] for row in steps)
    twice = [max(0.0, sum_s - row["time/step_s"]) for row, sum_s in zip(steps, known, strict=True)]
    columns["generating"] = [max(0.0, own - two) for own, two in zip(columns["generating"], twice, strict=True)]
    columns["other"] = [max(0.0, row["time/step_s"] - sum_s) for row, sum_s in zip(steps, known, strict=True)]
    after = {row["step"]: row.get("time/evaluating_s", 0.0) for row in rows if "time/step_s" not in row}
    for index, row in enumerate(steps):
        columns["evaluating"][index] += after.get(row["step"], 0.0) + (after.get(0, 0.0) if index == 0 else 0.0)
    names = {"generating": "generating and scoring"}
    shown = [
        {"name": names.get(n, n), "seconds": [number(s) for s in c]}
        for n, c in columns.items()
        if sum(c) > total / 1000
    ]
    return {"steps": [row["step"] for row in steps], "phases": shown}


def number(value: float) -> float | str:
    """Rounds to six digits; returns NaN and infinity as text, because JSON has no numbers for them."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _components(steps: Sequence[Row]) -> _Panel:
    names = dict.fromkeys(m for row in steps for m in row if m.startswith("reward/") and m not in _NO_COMPONENT)
    # A single component equals the reward, up to its weight.
    shown = {name.removeprefix("reward/"): name for name in names} if len(names) > 1 else {}
    return _Panel("Reward components", shown)


def _by_column(rows: Sequence[Row]) -> _Panel:
    """Returns the plot of rewards by the values of data.metrics_column, of training and of held-out sets."""
    names = sorted({metric for row in rows for metric in row if metric.rpartition("/")[2].startswith("reward[")})
    return _Panel("Reward by column", {_by_value(name): name for name in names})


def _by_value(metric: str) -> str:
    where, _, name = metric.rpartition("/")
    return f"{where.removeprefix('eval/')} {name[len('reward[') : -1]}".strip()


def _rows_with(metric: str, rows: Sequence[Row], steps: Sequence[Row]) -> Sequence[Row]:
    return thin([row for row in rows if metric in row]) if metric.startswith("eval/") else steps


def _learning_rate(steps: Sequence[Row]) -> list[_Panel]:
    rates = {row["train/lr"] for row in steps if "train/lr" in row}
    return [_Panel("Learning rate", {"lr": "train/lr"})] if len(rates) > 1 else []


def _series(name: str, metric: str, rows: Sequence[Row]) -> JsonObject:
    points = [(row["step"], number(row[metric])) for row in rows if metric in row]
    return {"name": name, "x": [step for step, _ in points], "y": [value for _, value in points]}
