"""Makes the BM25 index of a corpus once: later runs read it from a folder beside the corpus."""

import logging
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.reward.environments.toolbox.search_words import words

log = logging.getLogger(__name__)

# Other backends round differently, and would be taken if they are installed.
_BACKEND = {"backend": "numpy", "csc_backend": "numpy"}


def open_index(corpus: Path, version: str, documents: Iterable[str]) -> Any:
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


def _build(documents: Iterable[str]) -> Any:
    import bm25s

    ids: defaultdict[str, int] = defaultdict()
    ids.default_factory = ids.__len__
    tokens = [[ids[word] for word in words(document)] for document in documents]
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
