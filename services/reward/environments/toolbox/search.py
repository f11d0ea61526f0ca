"""Ranks the documents of a corpus by BM25."""

import asyncio
import hashlib
from collections.abc import Mapping
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.common.config.environment import SearchToolConfig
from services.reward.environments.clock import off_the_clock
from services.reward.environments.tool_calls.schema import text_tool_schema
from services.reward.environments.toolbox import search_words
from services.reward.environments.toolbox.base import BadArgumentsError, Tool
from services.reward.environments.toolbox.search_index import open_index
from services.reward.errors import EnvironmentFailure, EpisodeError

_CHUNK_BYTES = 1 << 22


class Search(Tool):
    """Returns the best documents for a query, those of equal scores in the order of the file."""

    schema = text_tool_schema(
        "search", "Searches a collection of documents and returns those that fit a query best.", "query",
        "What to search for.",
    )  # fmt: skip

    def __init__(self, config: SearchToolConfig):
        self._path, self._top_k = Path(config.corpus), config.top_k

    async def open(self) -> None:
        """Reads the corpus and its index, which is made when the corpus is first opened."""
        try:
            await asyncio.to_thread(self._load)
        except (ImportError, OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
            detail = f"search in {self._path}: {type(error).__name__}: {error}"
            raise EpisodeError(EnvironmentFailure.CRASHED, detail) from error

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        """Returns the documents with their numbers and titles. Waiting for a thread does not count toward `turn_s`."""
        query = arguments["query"]
        if not query.strip():
            raise BadArgumentsError("the query is empty")
        with off_the_clock():
            return await asyncio.to_thread(self._find, query)

    def _load(self) -> None:
        names = {"text", "title"} & set(pq.read_schema(self._path).names)
        self._documents: pa.Table = pq.read_table(self._path, columns=sorted(names))
        if self._documents.num_rows == 0 or "text" not in names:
            raise ValueError("a corpus must have documents, with a column text")
        version = f"bm25s-{version_of('bm25s')}-{search_words.VERSION}-{_digest(self._path)}"
        self._index: Any = open_index(self._path, version, map(self._document, range(self._documents.num_rows)))
        self.version = f"search-{version}"

    def _find(self, query: str) -> str:
        known = [word for word in search_words.words(query) if word in self._index.vocab_dict]
        if not known:
            return "No document was found."
        scores = self._index.get_scores(known)
        found = _best(scores, self._top_k)
        return "\n".join(f"Doc {rank}: {self._document(int(row))}" for rank, row in enumerate(found, 1))

    def _document(self, row: int) -> str:
        columns = self._documents.slice(row, 1).to_pylist()[0]
        title, text = columns.get("title"), columns["text"]
        return f"(Title: {title}) {text}" if title else text


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Returns the rows of the highest scores above 0, best first, then in the order of the rows."""
    least = np.partition(scores, -count)[-count] if count < len(scores) else 0
    rows = np.flatnonzero((scores >= least) & (scores > 0))
    return rows[np.argsort(-scores[rows], kind="stable")][:count]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:12]
