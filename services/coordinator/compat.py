"""Imports transformers and tensorboardX without torch, and compiles chat templates before they are rendered.

Reason: both import torch wherever it is installed. In transformers that takes four more seconds and 260 MB, and it
reads the metadata of all installed packages, 0.7 s, to know which one flash_attn is from; in tensorboardX 1.4 s and 180
MB, for figures and graphs that no run writes. transformers' public functions compile a template only when they render
it, so that a template with an error would be found in the first step. Seen with transformers 5.17.0 and 5.19.0, and
tensorboardX 2.6.5.
"""

import importlib.metadata
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jinja2

# A daemon reads the data of several runs in threads, and what is changed here meanwhile is the whole process's.
_importing = threading.Lock()


@contextmanager
def _without_torch() -> Iterator[None]:
    """Makes imports of torch fail in the block, unless this process has imported it. The caller holds `_importing`."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment] # Python's way to make an import fail
    try:
        yield
    finally:
        del sys.modules["torch"]


def import_tensorboardx() -> None:
    with _importing, _without_torch():
        import tensorboardX  # noqa: F401


def import_transformers() -> None:
    """Imports the tokenizers of transformers. A process that also runs models imports torch first; then it is used."""
    with _importing:
        # Only then does a module that is listed count as imported: another thread may be in the middle of it.
        if not ("torch" in sys.modules or "transformers" in sys.modules):
            _import_transformers()


def _import_transformers() -> None:
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())
    read_all, importlib.metadata.packages_distributions = importlib.metadata.packages_distributions, dict
    try:
        with _without_torch():
            from transformers import AutoTokenizer  # noqa: F401
    finally:
        importlib.metadata.packages_distributions = read_all


def compile_template(source: str) -> jinja2.Template:
    """Returns a chat template in the sandbox of transformers.

    Raises:
        jinja2.TemplateSyntaxError: `source` is not a template.
    """
    import_transformers()
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)
