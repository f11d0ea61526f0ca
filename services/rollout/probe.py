"""Checks the names of engine arguments: `python -m services.rollout.probe engine`; the request is `rollout.engine`."""

import dataclasses
import difflib
from collections.abc import Sequence

from services.common.errors import InvalidInput
from services.common.probe import Answers, Requests, answer_with


async def engine(requests: Requests) -> Answers:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    async for arguments in requests:
        if unknown := [name for name in arguments if name not in known]:
            raise InvalidInput("; ".join(_problem(name, known) for name in unknown), field="rollout.engine")
        yield {}


def _problem(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"rollout.engine.{name} is not an argument of vLLM's engine" + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    answer_with({"engine": engine})
