"""An agent that owns its loop: a program with the `openai` client, a tool and a memory that it cuts down by itself.

It asks a model for the value of a key. The model may look keys up, by text that this program reads; the table is in
lookup.py. deploy/runs/agent.yaml trains the model inside of it. Run it against any server of chat completions:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python -m deploy.quickstart.agent 123
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

from deploy.quickstart.lookup import lookup

MAX_CALLS = 4
MAX_MESSAGES = 3
CALL = re.compile(r"<lookup>(.*?)(</lookup>|$)", re.DOTALL)


def run(row: Mapping[str, Any], seed: int, url: str, key: str) -> str:
    """Returns the agent's answer to a row; what `environment.path` names."""
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        return solve(client, row["prompt"])


def solve(client: OpenAI, question: str) -> str:
    """Talks with the model until it answers, and returns its answer; an empty one if it does not."""
    history: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        said = client.chat.completions.create(model="policy", messages=history).choices[0].message
        call = CALL.search(said.content or "")
        if call is None:
            return said.content or ""
        result = {"role": "tool", "content": use_tool(*call.groups())}
        history += [{"role": "assistant", "content": said.content}, result]
        if len(history) > MAX_MESSAGES:  # the agent's own compaction: it keeps the question and the newest result
            history = [history[0], result]
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
        sys.stdout.write(solve(made, sys.argv[1]) + "\n")
