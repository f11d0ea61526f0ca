"""An agent that leads one conversation in any dialect, with the provider's own client, which sends answers back."""

import json
from typing import Any

import anthropic
import openai

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"a": {}, "b": {}}}


def speaks(row: Json, seed: int, url: str, key: str) -> str:
    """Asks, gives the result of a tool, and asks again. Returns the counts of tokens, if there were any."""
    return json.dumps({"chat": _chat, "messages": _messages, "responses": _responses}[row["dialect"]](url, key))


def _chat(url: str, key: str) -> list[int]:
    client, history = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), list[Any]()
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    for index, text in enumerate(("hello", "4", "more?")):
        result = {"role": "tool", "tool_call_id": history[-1].tool_calls[0].id} if index == 1 else {"role": "user"}
        history.append({**result, "content": text})
        answer = client.chat.completions.create(model="any", messages=history, tools=tools, stop="END")
        history.append(answer.choices[0].message)
    return []


def _messages(url: str, key: str) -> list[int]:
    client, history, counts = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0), list[Any](), list[int]()
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    for index, text in enumerate(("hello", "4", "more?")):
        result: Any = text
        if index == 1:
            result = [{"type": "tool_result", "tool_use_id": history[-1]["content"][-1].id, "content": text}]
        history.append({"role": "user", "content": result})
        counts.append(client.messages.count_tokens(model="any", messages=history, tools=tools).input_tokens)
        asked: Any = {"model": "any", "messages": history, "tools": tools, "stop_sequences": ["END"]}
        with client.messages.stream(**asked, max_tokens=100) as stream:
            answer = stream.get_final_message()
        assert answer.usage.input_tokens == counts[-1]
        assert answer.stop_reason == ("tool_use" if index == 0 else "stop_sequence"), answer
        history.append({"role": "assistant", "content": answer.content})
    return counts


def _responses(url: str, key: str) -> list[int]:
    client, history = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), list[Any]()
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": None}]
    for index, text in enumerate(("hello", "4", "more?")):
        result: Json = {"role": "user", "content": text}
        if index == 1:
            result = {"type": "function_call_output", "call_id": history[-1].call_id, "output": text}
        history.append(result)
        history += client.responses.create(model="any", input=history, tools=tools, store=False).output
    return []
