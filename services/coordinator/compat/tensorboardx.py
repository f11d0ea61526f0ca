"""Imports the part of tensorboardX that writes event files without the rest of it, which imports torch.

Reason: where torch is installed, `import tensorboardX` takes 1.4 s and 180 MB, for figures and graphs that no run
writes. Seen with tensorboardX 2.6.5.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec

_PACKAGE = "tensorboardX"
_MODULES = ("event_file_writer", "proto.event_pb2", "proto.summary_pb2")


def import_event_writer() -> None:
    """Imports `event_file_writer` and its messages, so that later import statements find them.

    The package itself stays unimported, so other code can still import it. If a version cannot be imported in this way,
    the later import statements import the whole package.
    """
    spec = find_spec(_PACKAGE)
    if _PACKAGE in sys.modules or spec is None:
        return
    sys.modules[_PACKAGE] = module_from_spec(spec)  # knows where its modules are, and is never executed
    try:
        with suppress(ImportError):
            for module in _MODULES:
                import_module(f"{_PACKAGE}.{module}")
    finally:
        del sys.modules[_PACKAGE]
