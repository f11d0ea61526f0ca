"""Makes files for episodes with a search, as Search-R1 (arXiv 2503.09516) has them: questions, and a corpus.

Questions are as NQ, HotpotQA and others publish them, {"question", "answer" or "answers" or "golden_answers"}, with one
answer or a list. Documents are {"text", "title"}, or {"contents"} with the title in the first line.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa

from services.common.errors import InvalidInput, NotFound
from services.coordinator.data.prepare.convert import ConversionReport, read_records
from services.coordinator.data.prepare.formats import Split, text
from services.coordinator.data.reading.parquet import Record, write_tables
from services.coordinator.data.reading.record import BadRow, BadRows

INSTRUCTION = (
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
    bad = BadRows(str(corpus), "bad", "Fix them, or drop them with --bad-rows drop")
    splits: dict[Split, pa.Table] = {}
    for split, path in questions.items():
        rows = [row for where, _, record in read_records(path, bad) if (row := _question(record, path, where, bad))]
        splits[split] = pa.Table.from_pylist(rows, _QUESTIONS)
    documents = pa.Table.from_batches(_documents(corpus, bad), _CORPUS)
    num_good = documents.num_rows + sum(table.num_rows for table in splits.values())
    bad.settle(bad_rows, total=num_good + len(bad.rows), field="source")
    tables = {out / f"{split}.parquet": table for split, table in splits.items()} | {out / "corpus.parquet": documents}
    if empty := [path.name for path, table in tables.items() if not table.num_rows]:
        raise InvalidInput(f"there are no rows for {empty[0]}", field="source")
    write_tables(tables)
    num_rows: dict[Split, int] = {split: table.num_rows for split, table in splits.items()}
    files: dict[Split, Path] = {split: out / f"{split}.parquet" for split in splits}
    source = f"{', '.join(map(str, questions.values()))}; {documents.num_rows} documents of {corpus}"
    return ConversionReport("search-r1", source, files, num_rows, tuple(bad.rows), num_held_out=0)


def _question(record: Record, path: Path, where: str, bad: BadRows) -> dict[str, object] | None:
    try:
        question, answers = text(record, "question"), _answers(record)
    except BadRow as error:
        bad.add(where, error)
        return None
    prompt = f"{INSTRUCTION}\n\nQuestion: {question}"
    return {"prompt": prompt, "answer": answers[0], "answers": answers, "source": path.stem}


def _answers(record: Record) -> list[str]:
    column = next((name for name in _ANSWER_COLUMNS if name in record), None)
    if column is None:
        raise BadRow(f"no column {' or '.join(_ANSWER_COLUMNS)}, only {', '.join(record)}")
    value = record[column]
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(a, str) and a.strip() for a in found):
        raise BadRow(f"{column} is neither text nor a list of texts")
    return [answer.strip() for answer in found]


def _documents(path: Path, bad: BadRows) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, str | None]] = []
    for where, _, record in read_records(path, bad):
        try:
            rows.append(_document(record))
        except BadRow as error:
            bad.add(where, error)
        if len(rows) == _DOCUMENTS_AT_ONCE:
            yield pa.RecordBatch.from_pylist(rows, _CORPUS)
            rows = []
    yield pa.RecordBatch.from_pylist(rows, _CORPUS)


def _document(record: Record) -> dict[str, str | None]:
    if "contents" not in record:
        return {"title": record.get("title") and text(record, "title"), "text": text(record, "text")}
    title, _, body = text(record, "contents").partition("\n")
    if not body.strip():
        return {"title": None, "text": title}
    return {"title": title.strip().strip('"'), "text": body.strip()}
