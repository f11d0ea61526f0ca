"""The result of a campaign as a table."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def table(rows: Iterable[Row]) -> str:
    """Returns a Markdown table: for each fault how the runs ended, and how long detection and recovery took."""
    by_fault: dict[str, list[Row]] = {}
    for row in rows:
        by_fault.setdefault(row["fault"], []).append(row)
    lines = [
        "| fault | episodes | survived | ended and resumed | reasons | detection s | recovery s | violations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault, found in sorted(by_fault.items()):
        survived = sum(row["outcomes"] == ["done"] for row in found)
        reasons = Counter(outcome for row in found for outcome in row["outcomes"] if outcome != "done")
        shown = ", ".join(f"{name} {count}" for name, count in reasons.most_common()) or "-"
        violations = sum(bool(row["violations"]) for row in found)
        times = [_times(row[name] for row in found) for name in ("detection_s", "recovery_s")]
        ended = len(found) - survived - violations
        lines.append(
            f"| {fault} | {len(found)} | {survived} | {ended} | {shown} | {' | '.join(times)} | {violations} |"
        )
    return "\n".join(lines)


def _times(values: Iterable[float | None]) -> str:
    """Median and worst."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} / {max(known):.1f}" if known else "-"
