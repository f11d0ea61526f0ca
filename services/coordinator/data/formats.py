"""The formats of public datasets, and how their answers are read; without imports that are slow for a command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from services.coordinator.data.reading.record import BadRow, Record, in_words

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Format:
    """A dataset: its id on the Hub, its files and the function that reads a row."""

    name: str
    hub_id: str
    files: Mapping[Split, tuple[str, ...]]
    """Globs of each published split; the first one that matches a file is used."""
    instruction: str
    """Text after the problem that tells the model how to answer, so that this dataset's scorer finds the answer."""
    parse: Callable[[Record], dict[str, str]]
    """Reads prompt, answer and worked solution, or an empty one, of a row. Raises BadRow if it cannot be used."""


def text(record: Record, column: str) -> str:
    """Returns `column` of `record` without surrounding white space.

    Raises:
        BadRow: The column is missing, not text, empty, or has half of a character.
    """
    if column not in record:
        raise BadRow(f"no column {column}, only {', '.join(record)}")
    value = record[column]
    if not isinstance(value, str):
        raise BadRow(f"{column} is {in_words(value)}, not text")
    if not value.strip():
        raise BadRow(f"{column} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{column} has {value[error.start]!a}, which is half of a character") from error
    return value.strip()


_MARK = "####"


def _parse_gsm8k(record: Record) -> dict[str, str]:
    problem, solution = text(record, "question"), text(record, "answer")
    _, mark, final = solution.rpartition(_MARK)
    answer = final.replace(",", "").strip()
    if not mark or not answer:
        raise BadRow(f"answer does not end with {_MARK} and the result")
    return {"prompt": problem, "answer": answer, "solution": solution}


GSM8K = Format(
    name="gsm8k",
    hub_id="openai/gsm8k",
    files={
        split: (f"main/{split}-*.parquet", f"{split}-*.parquet", f"{split}.parquet", f"{split}.jsonl")
        for split in ("train", "test")
    },
    instruction=f"Reason step by step, then give the result as a plain number after {_MARK}.",
    parse=_parse_gsm8k,
)


def _parse_deepscaler(record: Record) -> dict[str, str]:
    # Many problems come without a worked solution.
    has_solution = bool(str(record.get("solution") or "").strip())
    solution = text(record, "solution") if has_solution else ""
    return {"prompt": text(record, "problem"), "answer": text(record, "answer"), "solution": solution}


DEEPSCALER = Format(
    name="deepscaler",
    hub_id="agentica-org/DeepScaleR-Preview-Dataset",
    files={
        "train": ("deepscaler.json", "*.jsonl", "*.json", "data/*.parquet", "*.parquet"),
        "test": (
            "test.jsonl",
            "test.json",
            "data/test.parquet",
            "data/test-*.parquet",
            "test-*.parquet",
            "test.parquet",
        ),
    },
    instruction=r"Reason step by step, and put the final answer in \boxed{}.",
    parse=_parse_deepscaler,
)


FORMATS: Mapping[str, Format] = {format.name: format for format in (GSM8K, DEEPSCALER)}


@dataclass(frozen=True)
class ConversionOptions:
    bad_rows: Literal["fail", "drop"] = "fail"
    test_size: int = 500
    """Number of distinct problems to hold out as test if the source has no test split; 0 for none."""
    instruction: str | None = None
    """Text to append to each problem; None for the format's own, empty for nothing."""
    revision: str | None = None
