"""Makes the prompt files that a run reads, train.parquet and test.parquet, of published datasets or generated tasks.

For episodes with a search, as Search-R1 (arXiv 2503.09516) has them, there is a corpus too. Their questions are as NQ,
HotpotQA and others publish them, {"question", "answer" or "answers" or "golden_answers"}, with one answer or a list.
Documents are {"text", "title"}, or {"contents"} with the title in the first line.

The generated tasks are the quickstart's arithmetic, and those of reasoning-gym, which the environment `reasoning_gym`
scores. Arithmetic is additions and subtractions of whole numbers up to 99, written as `47+85=`. Answers are never
negative and have no leading zeros. A checksum of its operands, independent of the seed and of their order, assigns each
problem to the train or the test split, so no train set has a problem of any test set.
"""

import hashlib
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
from huggingface_hub import snapshot_download

from services.common.errors import InvalidInput, NotFound
from services.common.json_values import JsonMapping, JsonObject
from services.common.reasoning_tasks import COLUMN, INSTRUCTION, make_tasks
from services.coordinator.data.formats import ConversionOptions, Format, Split, text
from services.coordinator.data.reading.hub import hub_errors
from services.coordinator.data.reading.parquet import write_tables
from services.coordinator.data.reading.record import BadRow, BadRows, Record
from services.coordinator.data.reading.sources import read_usable

Parsed = TypeVar("Parsed")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FIELD = "source"


def find_files(format: Format, source: str, revision: str | None = None) -> dict[Split, list[Path]]:
    """Returns the files of each split. `source` is a file (all train), a directory, or a dataset's id on the Hub.

    Raises:
        NotFound: There is no such path or dataset, or it has none of the files of `format`.
        Unavailable: The Hub is unreachable.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return {"train": [path]}
    folder = path if path.is_dir() else _download(format, source, revision)
    files_of: dict[Split, list[Path]] = {}
    held_out = {file for pattern in format.files.get("test", ()) for file in folder.glob(pattern)}
    for split, patterns in format.files.items():
        found = (sorted(set(folder.glob(pattern)) - (held_out if split == "train" else set())) for pattern in patterns)
        if matches := next(filter(None, found), None):
            files_of[split] = matches
    if "train" not in files_of:
        names = ", ".join(sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*"))[:10]) or "nothing"
        wanted = " or ".join(format.files["train"])
        raise NotFound(f"{source} has no file {wanted} for {format.name}; it holds {names}", field=_FIELD)
    return files_of


def _parsed(path: Path, parse: Callable[[Record], Parsed], bad: BadRows) -> Iterator[tuple[int, Parsed]]:
    """Yields index and result of each record of a file that `parse` can use. Adds the others to `bad`."""
    for where, index, record in read_usable(path, bad, field=_FIELD):
        try:
            result = parse(record)
        except BadRow as error:
            bad.add(where, error)
        else:
            yield index, result


def _download(format: Format, source: str, revision: str | None) -> Path:
    if not _HUB_ID.fullmatch(source):
        raise NotFound(f"{source} does not exist and is not the id of a dataset on the Hub", field=_FIELD)
    patterns = [*chain.from_iterable(format.files.values())]
    with hub_errors(f"dataset {source}, which is no path here,", revision, _FIELD):
        return Path(snapshot_download(source, repo_type="dataset", revision=revision, allow_patterns=patterns))


_TEXT_COLUMNS = ("prompt", "answer", "source", "solution")
_PROBLEMS = pa.schema([*((name, pa.string()) for name in _TEXT_COLUMNS), ("index", pa.int64())])


@dataclass(frozen=True)
class ConversionReport:
    dataset: str
    source: str
    files: Mapping[str, Path]
    num_rows: Mapping[str, int]
    dropped: tuple[str, ...] = ()
    """`<file> <row or line>: <reason>` of every bad row."""
    num_held_out: int = 0
    """Number of test rows that were taken from train because the source has no test split."""


def convert(format: Format, source: str, out: Path, options: ConversionOptions) -> ConversionReport:
    """Writes the splits of `source` to `out`; on an error, writes no file.

    Raises:
        NotFound: There is no such path or Hub dataset, or it has no files of this format.
        Unavailable: The Hub is unreachable.
        InvalidInput: Rows are bad and `options.bad_rows` is "fail", or there are too few rows.
    """
    bad = BadRows(source, "bad", "Fix them, or drop them with --bad-rows drop")
    instruction = format.instruction if options.instruction is None else options.instruction
    splits: dict[Split, list[JsonObject]] = {}
    for split, paths in find_files(format, source, options.revision).items():
        rows = (parsed for path in paths for parsed in _parsed(path, format.parse, bad))
        splits[split] = [{**row, "source": format.name, "index": index} for index, row in rows]
        for row in splits[split] if instruction else ():
            row["prompt"] += f"\n\n{instruction}"
    num_good = sum(map(len, splits.values()))
    bad.settle(options.bad_rows, total=num_good + len(bad.rows), field="source")
    num_held_out = 0
    if "test" not in splits and options.test_size:
        splits = _hold_out(splits["train"], options.test_size)
        num_held_out = len(splits["test"])
    if empty := [split for split, rows in splits.items() if not rows]:
        raise InvalidInput(f"{source} has no rows for {empty[0]}", field="source")
    report = write_rows(format.name, source, splits, _PROBLEMS, out)
    return replace(report, dropped=tuple(bad.rows), num_held_out=num_held_out)


def write_rows(
    dataset: str, source: str, splits: Mapping[Split, Sequence[JsonMapping]], schema: pa.Schema, out: Path
) -> ConversionReport:
    tables = {split: pa.Table.from_pylist(rows, schema) for split, rows in splits.items()}
    return _write(dataset, source, tables, out)


def _write(dataset: str, source: str, tables: Mapping[str, pa.Table], out: Path) -> ConversionReport:
    """Writes `<out>/<name>.parquet` for each table, all or none.

    Raises:
        InvalidInput: There is no table for test.parquet, and `out` has one, which may share rows with the new files.
    """
    files = {name: out / f"{name}.parquet" for name in tables}
    if (old := out / "test.parquet").exists() and old not in files.values():
        raise InvalidInput(f"{old} is of an earlier conversion: delete it, or write to another directory", field="out")
    write_tables({files[name]: table for name, table in tables.items()})
    return ConversionReport(dataset, source, files, {name: table.num_rows for name, table in tables.items()})


def _hold_out(rows: list[JsonObject], num_problems: int) -> dict[Split, list[JsonObject]]:
    """Moves the problems with the lowest hashes to test, independent of row order; copies of a problem go together."""
    hashes = [hashlib.blake2b(" ".join(row["prompt"].split()).encode(), digest_size=16).digest() for row in rows]
    ranked = sorted(set(hashes))
    if num_problems >= len(ranked):
        message = f"--test-size {num_problems} leaves nothing to train on: the source has {len(ranked)} problems"
        raise InvalidInput(message, field="test_size")
    test = set(ranked[:num_problems])
    splits: dict[Split, list[JsonObject]] = {"train": [], "test": []}
    for row, digest in zip(rows, hashes, strict=True):
        splits["test" if digest in test else "train"].append(row)
    return splits


SEARCH_INSTRUCTION = (
    "Answer the question below. Whenever you learn something new, think about it first, between <think> and </think>. "
    "If you need to know more, write what to look for between <search> and </search>; the documents that are found "
    "follow between <information> and </information>. You may search several times. When you know the answer, write it "
    "between <answer> and </answer>, in as few words as possible and without an explanation, such as "
    "<answer> Beijing </answer>."
)

_QUESTIONS = pa.schema(
    [("prompt", pa.string()), ("answer", pa.string()), ("answers", pa.list_(pa.string())), ("source", pa.string())]
)
_CORPUS = pa.schema([("title", pa.string()), ("text", pa.string())])
_ANSWER_COLUMNS = ("golden_answers", "answers", "answer")
_DOCUMENTS_AT_ONCE = 65536


def make_search_files(
    questions: Mapping[Split, Path], corpus: Path, out: Path, bad_rows: Literal["fail", "drop"]
) -> ConversionReport:
    """Writes a file for each split of questions, and corpus.parquet; on an error, writes no file.

    Raises:
        NotFound: A file does not exist.
        InvalidInput: A file has no usable row, or a bad one and `bad_rows` is "fail".
    """
    for path in (*questions.values(), corpus):
        if not path.is_file():
            raise NotFound(f"{path} does not exist or is no file", field="source")
    source = ", ".join(map(str, (*questions.values(), corpus)))
    bad = BadRows(source, "bad", "Fix them, or drop them with --bad-rows drop")
    tables: dict[str, pa.Table] = {}
    for split, path in questions.items():
        rows = [row for _, row in _parsed(path, partial(_question, path.stem), bad)]
        tables[split] = pa.Table.from_pylist(rows, _QUESTIONS)
    # A corpus has millions of documents: as Arrow batches, they take a fraction of the memory that their rows take.
    documents = (document for _, document in _parsed(corpus, _document, bad))
    chunks = iter(lambda: list(islice(documents, _DOCUMENTS_AT_ONCE)), [])
    batches = (pa.RecordBatch.from_pylist(chunk, _CORPUS) for chunk in chunks)
    tables["corpus"] = pa.Table.from_batches(batches, _CORPUS)
    bad.settle(bad_rows, total=sum(map(len, tables.values())) + len(bad.rows), field="source")
    if empty := [name for name, table in tables.items() if not len(table)]:
        raise InvalidInput(f"there are no rows for {empty[0]}.parquet", field="source")
    return replace(_write("search-r1", source, tables, out), dropped=tuple(bad.rows))


def _question(source: str, record: Record) -> dict[str, object]:
    question, answers = text(record, "question"), _answers(record)
    prompt = f"{SEARCH_INSTRUCTION}\n\nQuestion: {question}"
    return {"prompt": prompt, "answer": answers[0], "answers": answers, "source": source}


def _answers(record: Record) -> list[str]:
    column = next((name for name in _ANSWER_COLUMNS if name in record), None)
    if column is None:
        raise BadRow(f"no column {' or '.join(_ANSWER_COLUMNS)}, only {', '.join(record)}")
    value = record[column]
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise BadRow(f"{column} is neither text nor a list of texts")
    return [text({column: answer}, column) for answer in answers]


def _document(record: Record) -> dict[str, str | None]:
    if "contents" not in record:
        return {"title": record.get("title") and text(record, "title"), "text": text(record, "text")}
    title, _, body = text(record, "contents").partition("\n")
    if not body.strip():
        return {"title": None, "text": title}
    return {"title": title.strip().strip('"'), "text": body.strip()}


MAX_OPERAND = 99
_TEST_ONE_IN = 10


def problems(split: Split, num: int, seed: int) -> list[JsonObject]:
    """Returns `num` distinct problems of `split` in random order; the same arguments give the same rows everywhere.

    The train split has 13,548 problems and the test split 1,502; two thirds are additions. `level` is the number of
    carries, or of borrows for a subtraction: 0 to 2.

    Raises:
        InvalidInput: `split` has fewer than `num` problems, or `num` is below one.
    """
    pool = _pool(split)
    if not 1 <= num <= len(pool):
        raise InvalidInput(
            f"num is {num}: it must be from 1 to {len(pool)}, the number of problems in the {split} split", field="num"
        )
    return [_problem(*key) for key in random.Random(f"{split}/{seed}").sample(pool, num)]


@cache
def _pool(split: Split) -> list[tuple[int, str, int]]:
    operands = range(MAX_OPERAND + 1)
    everything = [(a, op, b) for a in operands for op in "+-" for b in operands if op == "+" or a >= b]
    return [key for key in everything if _split_of(*key) == split]


def _split_of(a: int, op: str, b: int) -> Split:
    key = f"{min(a, b)}{op}{max(a, b)}"
    return "test" if zlib.crc32(key.encode()) % _TEST_ONE_IN == 0 else "train"


def _problem(a: int, op: str, b: int) -> JsonObject:
    answer = a + b if op == "+" else a - b
    # Every borrow of a - b is a carry of answer + b.
    level = _carries(a, b) if op == "+" else _carries(answer, b)
    return {"prompt": f"{a}{op}{b}=", "answer": str(answer), "level": level}


def _carries(a: int, b: int) -> int:
    """Counts the carries of `a + b`. Each carry reduces the digit sum by 9: ten less in one column, one more in the
    next.
    """
    return (sum(map(int, f"{a}{b}")) - sum(map(int, str(a + b)))) // 9


_ARITHMETIC = pa.schema([("prompt", pa.string()), ("answer", pa.string()), ("level", pa.int64())])
_TASKS = pa.schema([(name, pa.string()) for name in ("prompt", "answer", "source", COLUMN)])


def make_arithmetic(*, num_rows: Mapping[Split, int], seed: int, out: Path) -> ConversionReport:
    """Writes the splits to `out`. Raises InvalidInput as `problems` does."""
    rows: dict[Split, list[JsonObject]] = {split: problems(split, num, seed) for split, num in num_rows.items()}
    return write_rows("arithmetic", f"seed {seed}", rows, _ARITHMETIC, out)


def make_files(
    task: str, settings: Mapping[str, object], *, num_rows: Mapping[Split, int], seed: int, out: Path
) -> ConversionReport:
    """Writes the splits to `out`: one sequence of tasks, those of train first.

    Raises:
        InvalidInput: reasoning-gym is not installed, cannot make the task, or makes one that JSON cannot hold.
    """
    rows: dict[Split, list[JsonObject]] = {}
    first, tasks = 0, make_tasks(task, seed=seed, size=sum(num_rows.values()), settings=settings)
    for split, num in num_rows.items():
        rows[split] = [_row(task, settings, tasks, index) for index in range(first, first + num)]
        first += num
    return write_rows(f"reasoning-gym {task}", f"seed {seed}", rows, _TASKS, out)


def parse_settings(text: str) -> dict[str, object]:
    """Returns the settings of a task from JSON.

    Raises:
        InvalidInput: It is no JSON object.
    """
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--settings is not JSON: {error}", field="settings") from error
    if not isinstance(settings, dict):
        raise InvalidInput("--settings must be a JSON object", field="settings")
    return settings


def _row(task: str, settings: Mapping[str, object], tasks: Any, index: int) -> JsonObject:
    entry = tasks[index]
    answer, stored = str(entry["answer"]), json.dumps({"task": task, "settings": settings, "entry": entry})
    # JSON has no tuples, and two tasks (arc_agi and rearc in 0.1.25) score an answer to a list as wrong.
    if tasks.score_answer(answer, json.loads(stored)["entry"]) != tasks.score_answer(answer, entry):
        message = f"{task}: its tasks are scored differently when stored; let the environment make them from the seed"
        raise InvalidInput(message, field="task")
    prompt = f"{entry['question']}\n\n{INSTRUCTION}"
    return {"prompt": prompt, "answer": answer, "source": task, COLUMN: stored}
