"""Defines the base class for files of prompts and of SFT rows: reads files and tokenizes their rows."""

import difflib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import pyarrow as pa

from services.common.config.data import FilesConfig
from services.common.errors import InvalidInput
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.reading.columns import is_messages, types_with_fields
from services.coordinator.data.reading.record import MAX_DEPTH, BadRow, BadRows, Record, Unusable, depth_of
from services.coordinator.data.reading.sources import files_of, read_rows, warn_of_shared_files
from services.coordinator.text.chat_template import Message, TemplateRefusal
from services.coordinator.text.continued import encode_continued
from services.coordinator.text.tokenizer import Tokenizer

# Enough rows for all cores of the tokenizer, and few enough that their texts need little memory beside their tokens.
_ROWS_AT_ONCE = 4096
# No model reads as much. A tokenizer needs some 60 times the memory, and aborts the process if there is none.
_MOST_CHARACTERS = 1 << 24
_ROLES = ("system", "user", "assistant")
"""Those that every chat template shows or refuses. Others it may leave out without a word, such as `developer`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be used. `content_hash` covers the row as stored, before the chat template.

    `pieces` are either the prompt alone, or prompt, answer, text in between, answer, and so on. The prompt is tokenized
    alone, as it is at generation, and each other piece as it stands behind the one before it.
    """

    where: str
    number: int
    content_hash: bytes
    pieces: tuple[str, ...]

    @property
    def prompt_id(self) -> str:
        """Returns `<row number>-<hash of the row>`, unique in its dataset and independent of model and template."""
        return f"{self.number}-{self.content_hash.hex()[:8]}"


Files = TypeVar("Files", bound=FilesConfig)
ReadRow = TypeVar("ReadRow", bound=Row)


class HasLength(Protocol):
    """A tokenized row; the config limits its number of tokens."""

    @property
    def num_tokens(self) -> int: ...


Tokenized = TypeVar("Tokenized", bound=HasLength)


class RowFile(ABC, Generic[Files, ReadRow, Tokenized]):
    """A file with checked columns."""

    noun: ClassVar[str]
    """Name of the rows in messages."""
    keys: ClassVar[tuple[str, str, str]]
    """Keys of the config: rows of one batch, tokens of one row, and rows of each held-out file, all of them if None."""
    of_templates: ClassVar[tuple[str, ...]] = ("system_prompt", "chat_template_kwargs")
    """Keys of the config that only rows with the chat template use."""

    def __init__(self, path: Path, config: Files, tokenizer: Tokenizer, field: str, max_rows: int | None):
        self.path, self.config, self.tokenizer, self.field = path, config, tokenizer, field
        self._file = read_rows(path, field=field, max_rows=max_rows)
        self.is_templated = is_messages(self._check_columns()) or config.chat
        """Whether rows are rendered with the chat template."""
        self._check_template()

    @classmethod
    def train(cls, config: Files, tokenizer: Tokenizer, seed: int) -> tuple[list[Tokenized], EpochOrder]:
        """Returns all examples of the files in `config.train`, and their order in the batches of a run with `seed`.

        Raises:
            NotFound: A file does not exist.
            InvalidInput: A column is missing or has a wrong type, rows cannot be used or need a template and the model
                has none, or there are too few for one batch.
        """
        warn_of_shared_files(config.train, config.eval)
        examples = cls._read_all(config.train, config, tokenizer, "data.train")
        key = cls.keys[0]
        if (per_step := getattr(config, key)) > len(examples):
            message = f"data.{key} is {per_step}, but data.train has {len(examples)} {cls.noun}"
            raise InvalidInput(message, field=f"data.{key}")
        return examples, EpochOrder(len(examples), per_step, seed=seed, shuffle=config.shuffle)

    @classmethod
    def held_out(cls, config: Files, tokenizer: Tokenizer) -> dict[str, list[Tokenized]]:
        """Returns the examples of `config.eval` by set name, each set in file order.

        Raises:
            LockstepError: See `train`.
        """
        limit = getattr(config, cls.keys[2])
        return {
            name: cls._read_all((path,), config, tokenizer, f"data.eval.{name}", limit)
            for name, path in config.eval.items()
        }

    @classmethod
    def _read_all(
        cls, paths: Sequence[Path], config: Files, tokenizer: Tokenizer, field: str, max_rows: int | None = None
    ) -> list[Tokenized]:
        key, limit = cls.keys[1], getattr(config, cls.keys[1])
        bad = BadRows(field, "bad", "Fix them, or set data.bad_rows=drop")
        overlong = BadRows(field, f"above data.{key} {limit}", "Increase it, or set data.overlong=drop")
        examples: list[Tokenized] = []
        num_rows = 0
        for path in (file for pattern in paths for file in files_of(pattern, field=field)):
            file = cls(path, config, tokenizer, field, max_rows)
            for where, example in file._examples(bad, first_number=num_rows):
                if example.num_tokens > limit:
                    overlong.add(where, f"{example.num_tokens} tokens")
                else:
                    examples.append(example)
            num_rows += len(file._file)
        bad.settle(config.bad_rows, total=num_rows, field=field)
        overlong.settle(config.overlong, total=num_rows, field=f"data.{key}")
        if not examples:
            rows = f"{num_rows}" if cls.noun == "rows" else f"{num_rows} rows"
            message = f"{field}: no {cls.noun} left of {rows} in {', '.join(map(str, paths))}"
            raise InvalidInput(message, field=field)
        return examples

    @abstractmethod
    def _check_columns(self) -> pa.DataType:
        """Checks the columns and returns the type of the column of prompts or conversations."""

    @abstractmethod
    def _read(self, where: str, number: int, record: Record) -> ReadRow:
        """Converts `record` to a row. Raises BadRow if it cannot be used."""

    @abstractmethod
    def _example(self, row: ReadRow, pieces: list[list[int]]) -> Tokenized:
        """Converts `row` to an example; `pieces` are the tokens of its pieces. Raises BadRow if it cannot be used."""

    def _examples(self, bad: BadRows, first_number: int) -> Iterator[tuple[str, Tokenized]]:
        """Yields (place, example) of each row, numbered from `first_number`. Adds rows that cannot be used to `bad`."""
        rows = self._rows(bad, first_number)
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            for row, pieces in self._encode(chunk, bad):
                if not pieces[0]:
                    bad.add(row.where, "the prompt has no tokens")
                    continue
                try:
                    example = self._example(row, pieces)
                except BadRow as error:
                    bad.add(row.where, error)
                else:
                    yield row.where, example

    def _encode(self, rows: Sequence[ReadRow], bad: BadRows) -> Iterator[tuple[ReadRow, list[list[int]]]]:
        """Yields each of `rows` with the tokens of its pieces. Adds rows that the vocabulary has no tokens for to
        `bad`."""
        special = self.config.add_special_tokens and not self.is_templated  # a chat template adds special tokens itself
        try:
            prompts = self.tokenizer.encode_batch([row.pieces[0] for row in rows], add_special_tokens=special)
            later = iter(encode_continued(self.tokenizer, [pair for row in rows for pair in pairwise(row.pieces)]))
        except InvalidInput as error:
            if len(rows) == 1:
                bad.add(rows[0].where, error.message)
            else:
                for row in rows:
                    yield from self._encode([row], bad)
            return
        for row, prompt in zip(rows, prompts, strict=True):
            yield row, [prompt, *islice(later, len(row.pieces) - 1)]

    def _rows(self, bad: BadRows, first_number: int) -> Iterator[ReadRow]:
        for index, (where, record) in enumerate(self._file):
            try:
                row = self._read(where, first_number + index, record)
                if (size := sum(map(len, row.pieces))) > _MOST_CHARACTERS:
                    raise BadRow(f"its text has {size:,} characters, more than {_MOST_CHARACTERS:,}")
                yield row
            except (BadRow, TemplateRefusal) as error:
                bad.add(where, error)

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        system = self.config.system_prompt
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            raise BadRow("it has a system message, but data.system_prompt is set too")
        return [{"role": "system", "content": system}, *messages]

    def _type(self, column: str, key: str) -> pa.DataType:
        names = types_with_fields(self._file.types) if key == "data.answer_column" else self._file.types
        if column in names:
            return names[column]
        close = difflib.get_close_matches(column, names, n=1)
        if key == "data.answer_column":
            close += [name for name in names if name.endswith(".ground_truth")]  # as verl and SkyRL call it
        hint = f"; did you mean {close[0]}?" if close else ""
        if key == "data.answer_column":
            hint += "; if no scorer reads the answers, name any column of text"
        has = f"only {', '.join(names)}" if names else "and no other"
        raise InvalidInput(f"{key}: {self.path} has no column {column}, {has}{hint}", field=key)

    def _require(self, is_right: bool, column: str, key: str, problem: str) -> None:
        if not is_right:
            kind = types_with_fields(self._file.types)[column]
            raise InvalidInput(f"{key}: column {column} of {self.path} is {kind}, {problem}", field=key)

    def _check_template(self) -> None:
        if self.is_templated and not self.tokenizer.has_chat_template:
            need = "data.chat is set" if self.config.chat else f"the {self.noun} of {self.path} are messages"
            message = f"{need}, but the model has no chat template: set data.chat_template to a Jinja file"
            raise InvalidInput(message, field="data.chat_template")
        ignored = [key for key in self.of_templates if getattr(self.config, key)]
        if ignored and not self.is_templated:
            message = f"data.{ignored[0]} is set, but {self.path} has text prompts: set data.chat to template them"
            raise InvalidInput(message, field=f"data.{ignored[0]}")


def require_messages_shown(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> None:
    """Raises BadRow if the chat template leaves out a message of a role that it need not know."""
    marks = {index: f" lockstep-{index}-" for index, one in enumerate(messages) if one["role"] not in _ROLES}
    if not marks:
        return
    marked = [{**one, "content": f"{one['content']}{marks.get(index, '')}"} for index, one in enumerate(messages)]
    shown = render(marked)
    for index, mark in marks.items():
        if mark not in shown:
            raise BadRow(
                f"the chat template leaves out a message of role {messages[index]['role']}: give it another role, or "
                "set data.chat_template to one that shows it"
            )


def hash_of(stored: object, what: str = "it") -> bytes:
    """Returns a 128-bit hash of a row, or a part of it, as stored.

    Raises:
        BadRow: JSON or Unicode cannot hold it; names `what`.
    """

    def refuse(value: object) -> None:
        why = value.why if isinstance(value, Unusable) else f"a {type(value).__name__}, which is not JSON"
        raise BadRow(f"{what} holds {why}")

    try:
        content = json.dumps(stored, sort_keys=True, ensure_ascii=False, allow_nan=False, default=refuse)
        if depth_of(content) <= MAX_DEPTH:
            return hashlib.blake2b(content.encode(), digest_size=16).digest()
    except BadRow:
        raise
    except UnicodeEncodeError as error:
        raise BadRow(f"{what} holds {error.object[error.start]!r}, half of a character of UTF-16") from error
    except ValueError as error:
        raise BadRow(f"{what} holds NaN or infinity, which is not JSON") from error
    except RecursionError:
        pass
    raise BadRow(f"{what} nests more than {MAX_DEPTH} levels deep")
