"""Saves the result of a campaign to a file, and shows it as a table.

`python -m tests.campaign.table FILE ...` shows the results in the files as one table.
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def save(path: Path, content: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes `content` with the rows of all episodes, each as a line of its values in the order of `columns`."""
    columns = [*rows[0]]
    head = json.dumps({**content, "columns": columns}, indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps([row[column] for column in columns]) for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n')


def load(path: Path) -> list[Row]:
    """Returns the rows of a saved campaign."""
    content = json.loads(path.read_text())
    columns = content.get("columns")
    return [dict(zip(columns, row, strict=True)) for row in content["rows"]] if columns else content["rows"]


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
    """Returns the median and the worst of the known values as text, or "-" if none is known."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} / {max(known):.1f}" if known else "-"


if __name__ == "__main__":
    sys.stdout.write(table(row for name in sys.argv[1:] for row in load(Path(name))) + "\n")
