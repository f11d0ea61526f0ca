"""An agent with a sub-agent: it does not look anything up itself, and asks another conversation of the same model.

The sub-agent has a system prompt of its own and the tool. deploy/runs/agent-sub.yaml trains the model inside of both.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from openai import OpenAI

from deploy.quickstart.agent import client_of, solve, use_tool

SYSTEM = "#"
"""What tells the sub-agent's conversations apart. The model reads characters, and knows no words."""


def run(row: Mapping[str, Any], seed: int, url: str, key: str) -> str:
    """Returns the agent's answer to a row; what `environment.path` names."""
    client = client_of(url, key)
    return solve(client, [{"role": "user", "content": row["prompt"]}], partial(ask_other, client))


def ask_other(client: OpenAI, key: str, end: str) -> str:
    """Returns what the sub-agent says to a key, or an error in words for the model."""
    if not end:
        return "error: the call has no </lookup>"
    begin = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": key}]
    return solve(client, begin, use_tool)
