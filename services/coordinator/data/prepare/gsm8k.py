"""Reads GSM8K: grade-school word problems, arXiv 2110.14168. An answer's last line looks like `#### 1,234`."""

from services.coordinator.data.prepare.formats import Example, Format, Record, text
from services.coordinator.data.reading.bad_rows import BadRow

_MARK = "####"


def _parse(record: Record) -> Example:
    problem, solution = text(record, "question"), text(record, "answer")
    _, mark, final = solution.rpartition(_MARK)
    answer = final.replace(",", "").strip()
    if not mark or not answer:
        raise BadRow(f"answer does not end with {_MARK} and the result")
    return Example(problem, answer, solution)


GSM8K = Format(
    name="gsm8k",
    hub_id="openai/gsm8k",
    files={
        split: (f"main/{split}-*.parquet", f"{split}-*.parquet", f"{split}.parquet", f"{split}.jsonl")
        for split in ("train", "test")
    },
    instruction=f"Reason step by step, then give the result as a plain number after {_MARK}.",
    parse=_parse,
)
