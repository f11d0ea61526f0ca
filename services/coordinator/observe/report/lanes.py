"""Turns metrics.jsonl into lanes: when each side of the run was busy in a step, and how long it was idle."""

from collections.abc import Iterable, Mapping, Sequence

from services.coordinator.observe.report.curves import number, steps_of, thin
from services.coordinator.runs.lanes import LANES

_WIDTH = 44  # with name and seconds, a line of 80 columns


def lanes(rows: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """Returns each step that has lanes: `step`, its `seconds`, and `lanes` of name, begin, end and busy seconds.

    All steps have the same lanes. A lane that was idle for a whole step has zeros, such as that of the replicas in the
    last steps of a run with a lag.
    """
    steps = [row for row in thin(steps_of(rows)) if "time/generate_end_s" in row or "time/train_end_s" in row]
    names = [name for name in LANES if any(f"time/{name}_end_s" in row for row in steps)]
    return [{"step": row["step"], "seconds": number(row["time/step_s"]), "lanes": _of(row, names)} for row in steps]


def drawing(row: Mapping[str, float]) -> str:
    """Returns the lanes of a step as text, one line each: busy from the first call to the last, and its idle time."""
    step_s = row["time/step_s"]
    lines = [f"{'':>10}0 s{f'{step_s:.1f} s':>{_WIDTH - 3}}"]
    for name, begin_s, end_s, busy_s in _of(row, [name for name in LANES if f"time/{name}_end_s" in row]):
        begin, end = (round(float(at) / step_s * _WIDTH) for at in (begin_s, end_s))
        begin = min(begin, _WIDTH - 1)
        bar = " " * begin + "#" * max(1, end - begin)
        lines.append(f"{name:>9} {bar:<{_WIDTH}} busy {float(busy_s):.1f} s, idle {step_s - float(busy_s):.1f} s")
    return "\n".join(lines)


def _of(row: Mapping[str, float], names: Iterable[str]) -> list[tuple[str, float | str, float | str, float | str]]:
    def seconds(name: str, part: str) -> float | str:
        return number(row.get(f"time/{name}_{part}_s", 0.0))

    return [(name, seconds(name, "begin"), seconds(name, "end"), seconds(name, "busy")) for name in names]
