"""An agent like agent.py with the `anthropic` client: it streams, and counts tokens to decide when to cut its memory.

deploy/runs/agent-anthropic.yaml trains the model inside of it. The model writes calls of its tool as text, and gets the
results as blocks of a tool. A server that wants the calls as blocks, as Anthropic's does, refuses those.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from anthropic import Anthropic

from deploy.quickstart.agent import CALL, MAX_CALLS, use_tool

MAX_TOKENS = 24
"""Tokens of a prompt above which the agent forgets all but the question and the newest result."""


def run(row: Mapping[str, Any], seed: int, url: str, key: str) -> str:
    """Returns the agent's answer to a row; what `environment.path` names."""
    return solve(_shared(url).with_options(api_key=key), row["prompt"])


@cache
def _shared(url: str) -> Anthropic:
    """Returns the client whose connections all episodes of a process share."""
    return Anthropic(base_url=url, api_key="none")


def solve(client: Anthropic, question: str) -> str:
    """Talks with the model until it answers, and returns its answer; an empty one if it does not."""
    history: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        with client.messages.stream(model="policy", max_tokens=8, messages=history) as stream:
            said = stream.get_final_text()
        call = CALL.search(said)
        if call is None:
            return said
        block = {"type": "tool_result", "tool_use_id": "lookup", "content": use_tool(*call.groups())}
        result = {"role": "user", "content": [block]}
        history += [{"role": "assistant", "content": said}, result]
        if client.messages.count_tokens(model="policy", messages=history).input_tokens > MAX_TOKENS:
            history = [history[0], result]
    return ""
