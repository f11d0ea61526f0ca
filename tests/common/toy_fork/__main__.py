"""A service that can be forked. It says what it is, and ends as its argument says."""

import atexit
import json
import os
import sys
import tempfile
import threading

from services.common.rpc.fence import outgoing
from services.common.rpc.server import incarnation

imported_in = 0
kept: object = None


def preload() -> None:
    """Leaves traces that a fork must and must not have."""
    global imported_in
    if not imported_in:
        imported_in = os.getpid()
    os.environ["TOY_PRELOADED"] = "1"
    tempfile.gettempdir()  # which is kept, as an import of vLLM does


class Apart:
    def __del__(self) -> None:
        sys.stdout.write("taken apart\n")


def main() -> None:
    """Waits to be killed, or exits with a code."""
    global kept
    seen = {
        "argv": sys.argv,
        "imported_in": imported_in,
        "session": os.getsid(0),
        "given": os.environ.get("TOY_GIVEN"),
        "preloaded": os.environ.get("TOY_PRELOADED"),
        "incarnation": incarnation(),
        "token": outgoing()[0][1],
        "made": tempfile.mkdtemp() if sys.argv[1] == "wait" else "",
    }
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    if sys.argv[1] == "wait":
        threading.Event().wait()
    kept = Apart()
    if sys.argv[2:] == ["last words"]:
        atexit.register(sys.stdout.write, "last words\n")
    sys.exit(int(sys.argv[1]))
