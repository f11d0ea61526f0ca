"""Reads requests of OpenAI's chat completions, and writes their answers.

A request becomes one without dialect: messages with role, content and, where there are, tool_calls (id, name,
arguments), tool_call_id, name and reasoning; tools; max_tokens; stop.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.reward.v1.agent_pb2 import CallAnswer

Json = dict[str, Any]

MODEL = "policy"
_REPLACED = {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"}
_REPLACED |= {"repetition_penalty", "reasoning_effort", "verbosity"}
_LIMITS = ("max_tokens", "max_completion_tokens")
_WITHOUT_MEANING = {"model", "messages", "tools", "stream", "stream_options", "stop", "user", "metadata", "store"}
_WITHOUT_MEANING |= {"service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", *_LIMITS}
# Values that ask for nothing special, of keys that are otherwise refused.
_PLAIN: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refusal(Exception):
    """A request that is answered with an error. SDKs do not repeat a request with status 400."""

    def __init__(self, message: str, *, status: int = 400, param: str = "", code: str = ""):
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": "invalid_request_error", "param": param or None, "code": code or None}
        }


@dataclass(frozen=True)
class ChatRequest:
    """A request, and how its answer is to be written."""

    neutral: Json
    overridden: Sequence[str] = ()
    streams: bool = False
    shows_usage: bool = field(default=False)


def read_request(body: bytes, drop_tools: Collection[str]) -> ChatRequest:
    """Reads a request, without tools of the types `drop_tools`.

    Raises:
        Refusal: It is malformed, or asks for what would change the distribution or cannot be rendered.
    """
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise Refusal("the body must be a JSON object")
    said = {key: value for key, value in said.items() if value is not None}
    for key, value in said.items():
        if key not in _REPLACED | _WITHOUT_MEANING and value not in _PLAIN.get(key, ()) and value not in ([], {}):
            raise Refusal(f"{key}: {json.dumps(value)[:100]} is not supported while a model is trained", param=key)
    messages = said.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages: must be a list of at least one message", param="messages")
    limits = [said[key] for key in _LIMITS if key in said]
    if not all(type(limit) is int and limit > 0 for limit in limits):
        raise Refusal("max_tokens: must be a number above 0", param="max_tokens")
    stop = said.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refusal("stop: must be a text or a list of texts", param="stop")
    neutral = {
        "messages": [_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        "tools": _tools(said.get("tools", []), drop_tools),
        "max_tokens": min(limits, default=0),
        "stop": stop,
    }
    options = said.get("stream_options")
    shows_usage = bool(isinstance(options, dict) and options.get("include_usage"))
    return ChatRequest(neutral, sorted(_REPLACED & said.keys()), bool(said.get("stream")), shows_usage)


def _message(message: object, where: str) -> Json:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Refusal(f"{where}: must have a role: {', '.join(_ROLES)}", param=where)
    said = {key: value for key, value in message.items() if value not in (None, [], {})}
    read: Json = {"role": _ROLES[said.pop("role")], "content": _text(said.pop("content", ""), f"{where}.content")}
    if read["role"] == "assistant":
        if calls := said.pop("tool_calls", []):
            read["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
        if reasoning := said.pop("reasoning_content", said.pop("reasoning", "")):
            read["reasoning"] = _text(reasoning, f"{where}.reasoning")
    for key in {"tool": ("tool_call_id", "name")}.get(read["role"], ("name",)):
        if key in said:
            read[key] = _text(said.pop(key), f"{where}.{key}")
    if said.keys() - {"refusal", "cache_control", "annotations"}:
        key = min(said.keys() - {"refusal", "cache_control", "annotations"})
        raise Refusal(f"{where}.{key} is not supported while a model is trained", param=f"{where}.{key}")
    return read


def _text(content: object, where: str) -> str:
    """Returns the text of a content, whose parts are joined."""
    parts = [content] if isinstance(content, str) else content
    if isinstance(parts, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts)).encode(errors="replace").decode()
    raise Refusal(f"{where}: only text is supported", param=where)


def _tool_call(call: object, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise Refusal(f"{where}: a call must be of a function", param=where)
    fields = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments", "{}")}
    return {name: _text(value, f"{where}.{name}") for name, value in fields.items()}


def _tools(tools: object, drop_tools: Collection[str]) -> list[Json]:
    if not isinstance(tools, list):
        raise Refusal("tools: must be a list", param="tools")
    read: list[Json] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in drop_tools:
            continue
        function = tool.get("function") if isinstance(tool, dict) else None
        if kind != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(
                f"tools: only functions are supported, not {kind!r:.50}; environment.drop_tools can leave it out",
                param="tools",
            )
        shown = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        read.append({"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **shown}})
    return read


def write_answer(answer: CallAnswer) -> Json:
    """Returns the body of an answer that is not streamed."""
    choice = {"index": 0, "message": _assistant(answer), "logprobs": None, "finish_reason": answer.finish_reason}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def write_stream(answer: CallAnswer, *, shows_usage: bool) -> Iterator[bytes]:
    """Yields the events of a streamed answer, which is complete when it begins."""
    message = _assistant(answer)
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", []))]
    said = {key: value for key, value in message.items() if key in ("content", "reasoning_content") and value}
    deltas: list[Json] = [{"role": "assistant", "content": ""}, *({key: value} for key, value in said.items())]
    deltas += [{"tool_calls": [call]} for call in calls]
    head = _head(answer, "chat.completion.chunk")
    for delta, reason in [*((delta, None) for delta in deltas), ({}, answer.finish_reason)]:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    if shows_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def write_models(max_model_len: int) -> Json:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lockstep", "max_model_len": max_model_len}
    return {"object": "list", "data": [model]}


def write_error(refusal: Refusal) -> bytes:
    """Returns the event of an error in a stream that has begun."""
    return _event(refusal.body)


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _head(answer: CallAnswer, kind: str) -> Json:
    return {"id": f"chatcmpl-{answer.call}", "object": kind, "created": int(time.time()), "model": MODEL}


def _assistant(answer: CallAnswer) -> Json:
    said = json.loads(answer.message_json)
    message: Json = {"role": "assistant", "content": said["content"], "refusal": None}
    if calls := said.get("tool_calls"):
        message["content"] = said["content"] or None
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        pairs = zip(calls, functions, strict=True)
        message["tool_calls"] = [{"id": call["id"], "type": "function", "function": one} for call, one in pairs]
    return message | ({"reasoning_content": said["reasoning"]} if said.get("reasoning") else {})


def _usage(answer: CallAnswer) -> Json:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
