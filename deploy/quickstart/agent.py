"""An agent that owns its loop: a program with the `openai` client, a tool and a memory that it cuts down by itself.

It asks a model for the value of a key. The model may look keys up, by text that this program reads; the table is in
lookup.py. deploy/runs/agent.yaml trains the model inside of it. Run it against any server of chat completions:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python -m deploy.quickstart.agent 123
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from openai import OpenAI

from deploy.quickstart.lookup import lookup

MAX_CALLS = 4
MAX_ADDED = 2
CALL = re.compile(r"<lookup>(.*?)(</lookup>|$)", re.DOTALL)


def run(row: Mapping[str, Any], seed: int, url: str, key: str) -> str:
    """Returns the agent's answer to a row; what `environment.path` names."""
    return solve(client_of(url, key), [{"role": "user", "content": row["prompt"]}], use_tool)


def client_of(url: str, key: str) -> OpenAI:
    """Returns a client for one episode. All episodes of a process share the connections of one."""
    return _shared(url).with_options(api_key=key)


@cache
def _shared(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none")  # which takes longer than a call: it reads all authorities


def solve(client: OpenAI, begin: list[Any], tool: Callable[[str, str], str]) -> str:
    """Talks with the model until it answers, and returns its answer; an empty one if it does not."""
    history = begin
    for _ in range(MAX_CALLS):
        said = client.chat.completions.create(model="policy", messages=history).choices[0].message
        call = CALL.search(said.content or "")
        if call is None:
            return said.content or ""
        result = {"role": "tool", "content": tool(*call.groups())}
        history = [*history, {"role": "assistant", "content": said.content}, result]
        if len(history) > len(begin) + MAX_ADDED:  # its own compaction: it keeps the question and the newest result
            history = [*begin, result]
    return ""


def use_tool(key: str, end: str) -> str:
    """Returns the result of a call, or an error in words for the model."""
    if not end:
        return "error: the call has no </lookup>"
    try:
        return lookup(key)
    except ValueError as error:
        return f"error: {error}"


if __name__ == "__main__":
    with OpenAI() as made:
        sys.stdout.write(solve(made, [{"role": "user", "content": sys.argv[1]}], use_tool) + "\n")
