"""Checks in a process of its own what may hang or end it: user code, a sandbox, a large library.

`python -m services.reward.probe CHECK` reads requests from stdin and writes an answer to each, all as JSON in a line.
services.rollout.probe and this module have other checks. The answer {"error": "...", "field": "..."} says why a check
failed and which key to correct, or null, and is the last. What the tried code prints goes to stderr. The process ends
with its input, and with the one that started it.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from services.common.errors import LockstepError
from services.common.import_path import require_function
from services.common.process import exit_with

Requests = AsyncIterator[Any]
Answers = AsyncIterator[Mapping[str, object]]


def answer_with(checks: Mapping[str, Callable[[Requests], Answers]]) -> None:
    """Runs the check that the command line names until the end of input."""
    exit_with(os.getppid())  # the tried code may hang, and then nothing reads the input
    asyncio.run(_answer(checks[sys.argv[1]]))


async def _answer(check: Callable[[Requests], Answers]) -> None:
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # a line that user code prints is no answer
        try:
            async for answer in check(_requests()):
                output.write(json.dumps(answer) + "\n")
                output.flush()
        except LockstepError as error:
            output.write(json.dumps({"error": error.message, "field": error.metadata.get("field")}) + "\n")


async def _requests() -> Requests:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


async def functions(requests: Requests) -> Answers:
    """Imports functions. A request maps config keys to path, names of positional arguments, and keyword arguments."""
    async for request in requests:
        for field, (path, args, kwargs) in request.items():
            require_function(path, args, kwargs, field=field)
        yield {}


if __name__ == "__main__":
    answer_with({"functions": functions})
