"""Searches a corpus: splits texts into words, makes the BM25 index once, and ranks documents by it."""

import asyncio
import hashlib
import logging
import re
import shutil
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version as version_of
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.common.config.environment import SearchToolConfig
from services.reward.environments.base import BadArgumentsError, Tool, off_the_clock, text_tool_schema
from services.reward.errors import EnvironmentFailure, EpisodeError

if TYPE_CHECKING:
    from bm25s import BM25

log = logging.getLogger(__name__)

_WORDS_VERSION = f"words-1-{unicodedata.unidata_version}"  # must change whenever a text could get other words
# Without "a", which is a name as other letters are: vitamin A.
_ENGLISH = """an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with"""
_STOP_WORDS = frozenset(_ENGLISH.split())
# Scripts that put no space between words (Chinese, Japanese, Thai and others) and Korean, which adds particles to them,
# are split into single characters and pairs of neighbors, as Lucene does: "東京都" is 東, 京, 都, 東京 and 京都.
_DENSE = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf\u1b00-\u1b7f\ua980-\ua9df"  # Tai scripts, Balinese, Javanese
    "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff"  # Hangul
    "\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff\U0001b000-\U0001b16f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\ua000-\ua4cf]"  # Han, Yi
)
# Soft hyphens, joiners and marks of direction, which are not seen.
_UNSEEN = re.compile("[\u00ad\u200c-\u200f\u202a-\u202e\u2060\ufeff]")
_NAME_END = r"(?:(?:\+\+?|#)(?![\w+#]))?"
_ASCII_WORD = re.compile(rf"\w+{_NAME_END}")
# These match the kinds of the characters in place of the characters.
_CHARACTER = re.compile("dm*")
_WORD = re.compile(rf"(?P<dense>(?:dm*)+)|[wm]+{_NAME_END}")


class _Kinds(dict[int, str]):
    """Maps a character to its kind: d of a dense script, w of another word, m a mark on the one before; else itself.

    Python's regular expressions count the marks of Indic and other scripts as no part of a word.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if unicodedata.category(character).startswith("M"):
            kind = "m"
        elif character.isalnum() or character == "_":
            kind = "d" if _DENSE.match(character) else "w"
        else:
            kind = character if character in "+#" else " "
        self[code] = kind
        return kind


_KINDS = _Kinds()


def split_words(text: str) -> list[str]:
    """Returns the words of a text in their order, with repetitions. Case, width and composition do not count.

    Names such as C++, C# and F# are a word beside that of their letter.
    """
    if text.isascii():
        return _with_letters(_ASCII_WORD.findall(text.lower()))
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text)).casefold()
    text = unicodedata.normalize("NFKC", text)  # folding case may undo the first normalization
    kinds = text.translate(_KINDS)
    result: list[str] = []
    for word in _WORD.finditer(kinds):
        begin, end = word.span()
        if word["dense"]:
            characters = [text[slice(*one.span())] for one in _CHARACTER.finditer(kinds, begin, end)]
            result += characters
            result += map("".join, pairwise(characters))
        else:
            result += _with_letters([text[begin:end]])
    return result


def _with_letters(names: list[str]) -> list[str]:
    result = []
    for name in names:
        letters = name.rstrip("+#")
        if letters not in _STOP_WORDS:
            result.append(letters)
        if letters != name:
            result.append(name)
    return result


# Other backends round differently, and would be taken if they are installed.
_BACKEND = {"backend": "numpy", "csc_backend": "numpy"}


def open_index(corpus: Path, version: str, documents: Iterable[str]) -> "BM25":
    """Returns the index, a bm25s.BM25, of the corpus' `documents`.

    The folder is named after `version`, which changes with the corpus, with bm25s and with how words are found. It has
    numpy arrays and JSON, and is read without pickle. If it cannot be written, the index is in memory only.

    Raises:
        ValueError: No document has a word, or an array in the folder is not a plain one.
        OSError: The folder is damaged.
    """
    import bm25s

    folder = corpus.with_name(f"{corpus.name}.{version}")
    if folder.is_dir():
        log.info("reading the index %s", folder)
        reader: Any = bm25s.BM25
        return reader.load(folder, show_progress=False, override_params=_BACKEND)
    index = _build(documents)
    try:
        _save(index, folder)
    except OSError as error:
        log.warning("the index is made again in every run, because it cannot be kept: %s", error)
    return index


def _build(documents: Iterable[str]) -> "BM25":
    import bm25s

    ids: defaultdict[str, int] = defaultdict()
    ids.default_factory = ids.__len__
    tokens = [[ids[word] for word in split_words(document)] for document in documents]
    if not ids:
        raise ValueError("no document has a word")
    index = bm25s.BM25(**_BACKEND)
    index.index((tokens, dict(ids)), show_progress=False)
    return index


def _save(index: Any, folder: Path) -> None:
    """Writes the folder whole or not at all. If another process was faster, its folder stays."""
    written = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        index.save(written, show_progress=False)
        written.chmod(0o755)  # as other folders are: the temporary one is only for this user
        if not folder.is_dir():
            written.rename(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)


class Search(Tool):
    """Returns the best documents for a query, those of equal scores in the order of the file."""

    schema = text_tool_schema(
        "search", "Searches a collection of documents and returns those that fit a query best.", "query",
        "What to search for.",
    )  # fmt: skip

    def __init__(self, config: SearchToolConfig):
        self._path, self._top_k = Path(config.corpus), config.top_k

    async def open(self) -> None:
        try:
            await asyncio.to_thread(self._load)
        except (ImportError, OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
            detail = f"search in {self._path}: {type(error).__name__}: {error}"
            raise EpisodeError(EnvironmentFailure.CRASHED, detail) from error

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        query = arguments["query"]
        if not query.strip():
            raise BadArgumentsError("the query is empty")
        with off_the_clock():  # it may wait for a thread
            return await asyncio.to_thread(self._find, query)

    def _load(self) -> None:
        names = {"text", "title"} & set(pq.read_schema(self._path).names)
        self._documents: pa.Table = pq.read_table(self._path, columns=sorted(names))
        if self._documents.num_rows == 0 or "text" not in names:
            raise ValueError("a corpus must have documents, with a column text")
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
        version = f"bm25s-{version_of('bm25s')}-{_WORDS_VERSION}-{digest}"
        self._index = open_index(self._path, version, map(self._document, range(self._documents.num_rows)))
        self.version = f"search-{version}"

    def _find(self, query: str) -> str:
        known_words = [word for word in split_words(query) if word in self._index.vocab_dict]
        if not known_words:
            return "No document was found."
        rows = _best(self._index.get_scores(known_words), self._top_k)
        return "\n".join(f"Doc {rank}: {self._document(int(row))}" for rank, row in enumerate(rows, 1))

    def _document(self, row: int) -> str:
        columns = self._documents.slice(row, 1).to_pylist()[0]
        title, text = columns.get("title"), columns["text"]
        return f"(Title: {title}) {text}" if title else text


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Returns the rows of the highest scores above 0, best first, then in the order of the rows."""
    least = np.partition(scores, -count)[-count] if count < len(scores) else 0
    rows = np.flatnonzero((scores >= least) & (scores > 0))
    return rows[np.argsort(-scores[rows], kind="stable")][:count]
