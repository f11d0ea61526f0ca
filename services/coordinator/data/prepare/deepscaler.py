"""Reads DeepScaleR-Preview: 40 thousand competition problems with LaTeX answers, in one split."""

from services.coordinator.data.prepare.formats import Example, Format, Record, text


def _parse(record: Record) -> Example:
    # Many problems come without a worked solution.
    has_solution = bool(str(record.get("solution") or "").strip())
    return Example(text(record, "problem"), text(record, "answer"), text(record, "solution") if has_solution else "")


DEEPSCALER = Format(
    name="deepscaler",
    hub_id="agentica-org/DeepScaleR-Preview-Dataset",
    files={"train": ("deepscaler.json", "*.jsonl", "*.json", "data/*.parquet", "*.parquet")},
    instruction=r"Reason step by step, and put the final answer in \boxed{}.",
    parse=_parse,
)
