"""OpenAI's chat completions."""

import json
import time
from collections.abc import Iterator

from lockstep.reward.v1.agent_pb2 import CallAnswer

from services.common.json_values import JsonObject
from services.reward.agents.dialect import (
    MODEL,
    Dialect,
    Drops,
    Refusal,
    Request,
    event,
    read_limit,
    read_list,
    read_object,
    read_stop,
    read_text,
    read_tool,
)

_REPLACED = {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"}
_REPLACED |= {"repetition_penalty", "reasoning_effort", "verbosity"}
_LIMITS = ("max_tokens", "max_completion_tokens")
_KNOWN = {"model", "messages", "tools", "stream", "stream_options", "stop", "user", "metadata", "store", *_LIMITS}
_KNOWN |= {"service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction", *_REPLACED}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Chat(Dialect):
    """POST /v1/chat/completions."""

    def read(self, body: bytes, drops: Drops) -> Request:
        said = read_object(body, _KNOWN, drops.fields)
        messages = read_list(said.get("messages"), "messages", 1)
        tools = [tool for tool in read_list(said.get("tools", []), "tools") if str(tool.get("type")) not in drops.tools]
        neutral = {
            "messages": [_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
            "tools": [read_tool(_function(tool), tool.get("type")) for tool in tools],
            "max_tokens": read_limit(said, *_LIMITS),
            "stop": read_stop(said, "stop"),
        }
        options = said.get("stream_options")
        shows_usage = bool(isinstance(options, dict) and options.get("include_usage"))
        return Request(neutral, sorted(_REPLACED & said.keys()), bool(said.get("stream")), shows_usage)

    def answer(self, answer: CallAnswer) -> JsonObject:
        choice = {"index": 0, "message": _assistant(answer), "logprobs": None, "finish_reason": answer.finish_reason}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def stream(self, answer: CallAnswer, request: Request) -> Iterator[bytes]:
        message = _assistant(answer)
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", []))]
        said = {key: value for key, value in message.items() if key in ("content", "reasoning_content") and value}
        deltas: list[JsonObject] = [
            {"role": "assistant", "content": ""},
            *({key: value} for key, value in said.items()),
        ]
        deltas += [{"tool_calls": [call]} for call in calls]
        head = _head(answer, "chat.completion.chunk")
        for delta, reason in [*((delta, None) for delta in deltas), ({}, answer.finish_reason)]:
            yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
        if request.shows_usage:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"


def write_model(max_model_len: int) -> JsonObject:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "lockstep", "max_model_len": max_model_len}


def _message(message: JsonObject, where: str) -> JsonObject:
    if str(message.get("role")) not in _ROLES:
        raise Refusal(f"{where}: must have a role: {', '.join(_ROLES)}", param=where)
    said = {key: value for key, value in message.items() if value not in (None, [], {})}
    read: JsonObject = {
        "role": _ROLES[said.pop("role")],
        "content": read_text(said.pop("content", ""), f"{where}.content"),
    }
    if read["role"] == "assistant":
        if calls := said.pop("tool_calls", []):
            at = f"{where}.tool_calls"
            read["tool_calls"] = [_tool_call(call, at) for call in read_list(calls, at)]
        if reasoning := said.pop("reasoning_content", said.pop("reasoning", "")):
            read["reasoning"] = read_text(reasoning, f"{where}.reasoning")
    for key in {"tool": ("tool_call_id", "name")}.get(read["role"], ("name",)):
        if key in said:
            read[key] = read_text(said.pop(key), f"{where}.{key}")
    if said.keys() - {"refusal", "cache_control", "annotations"}:
        key = min(said.keys() - {"refusal", "cache_control", "annotations"})
        raise Refusal(f"{where}.{key} is not supported while a model is trained", param=f"{where}.{key}")
    return read


def _tool_call(call: JsonObject, where: str) -> JsonObject:
    function = call.get("function")
    if not isinstance(function, dict):
        raise Refusal(f"{where}: a call must be of a function", param=where)
    fields = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments", "{}")}
    return {name: read_text(value, f"{where}.{name}") for name, value in fields.items()}


def _function(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    return function if tool.get("type") == "function" and isinstance(function, dict) else {}


def _head(answer: CallAnswer, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{answer.call}", "object": kind, "created": int(time.time()), "model": MODEL}


def _assistant(answer: CallAnswer) -> JsonObject:
    said = json.loads(answer.message_json)
    message: JsonObject = {"role": "assistant", "content": said["content"], "refusal": None}
    if calls := said.get("tool_calls"):
        message["content"] = said["content"] or None
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        pairs = zip(calls, functions, strict=True)
        message["tool_calls"] = [{"id": call["id"], "type": "function", "function": one} for call, one in pairs]
    return message | ({"reasoning_content": said["reasoning"]} if said.get("reasoning") else {})


def _usage(answer: CallAnswer) -> JsonObject:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
