"""Checks the names of engine arguments: `python -m services.rollout.probe`, with `rollout.engine` as JSON on stdin.

The exit code is 0 if vLLM has all of them; otherwise it is 1, and stderr says which it does not have.
"""

import dataclasses
import difflib
import json
import sys
from typing import Any


def main() -> None:
    """Compares the names with the fields of vLLM's engine arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    given: dict[str, Any] = json.load(sys.stdin)
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    unknown = [name for name in given if name not in known]
    if unknown:
        sys.exit("; ".join(_problem(name, known) for name in unknown))


def _problem(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"rollout.engine.{name} is not an argument of vLLM's engine" + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    main()
