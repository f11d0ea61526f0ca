"""OpenAI's chat completions and Responses."""

import itertools
import json
import time
from collections.abc import Collection, Iterator

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
    unsupported,
)

_KNOWN = {"model", "tools", "stream", "stream_options", "user", "metadata", "store", "service_tier"}
_KNOWN |= {"prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_CHAT_LIMITS = ("max_tokens", "max_completion_tokens")
_CHAT_REPLACED = {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"}
_CHAT_REPLACED |= {"repetition_penalty", "reasoning_effort", "verbosity"}
_CHAT_KNOWN = {"messages", "stop", "prediction", *_CHAT_LIMITS, *_CHAT_REPLACED, *_KNOWN}
_CHAT_ROLES = {**_ROLES, "tool": "tool"}


class Chat(Dialect):
    """POST /v1/chat/completions."""

    def read(self, body: bytes, drops: Drops) -> Request:
        said = read_object(body, _CHAT_KNOWN, drops.fields)
        messages = read_list(said.get("messages"), "messages", 1)
        tools = [tool for tool in read_list(said.get("tools", []), "tools") if str(tool.get("type")) not in drops.tools]
        neutral = {
            "messages": [_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
            "tools": [read_tool(_function(tool), tool.get("type")) for tool in tools],
            "max_tokens": read_limit(said, *_CHAT_LIMITS),
            "stop": read_stop(said, "stop"),
        }
        options = said.get("stream_options")
        shows_usage = bool(isinstance(options, dict) and options.get("include_usage"))
        return Request(neutral, sorted(_CHAT_REPLACED & said.keys()), bool(said.get("stream")), shows_usage)

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
    if str(message.get("role")) not in _CHAT_ROLES:
        raise Refusal(f"{where}: must have a role: {', '.join(_CHAT_ROLES)}", param=where)
    said = {key: value for key, value in message.items() if value not in (None, [], {})}
    read: JsonObject = {
        "role": _CHAT_ROLES[said.pop("role")],
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


_RESPONSES_REPLACED = {"temperature", "top_p", "reasoning"}
_RESPONSES_KNOWN = {"input", "instructions", "max_output_tokens", "text", "include", "client_metadata"}
_RESPONSES_KNOWN |= _RESPONSES_REPLACED | _KNOWN
_TEXTS = ("input_text", "output_text", "text")


class Responses(Dialect):
    """POST /v1/responses."""

    def read(self, body: bytes, drops: Drops) -> Request:
        said = read_object(body, _RESPONSES_KNOWN, drops.fields)
        text = said.get("text", {})
        if not isinstance(text, dict) or text.get("format") not in (None, {"type": "text"}):
            raise unsupported("text", text)
        tools = [tool for tool in read_list(said.get("tools", []), "tools") if str(tool.get("type")) not in drops.tools]
        neutral = {
            "messages": _read_input(said),
            "tools": [read_tool(tool if tool.get("type") == "function" else {}, tool.get("type")) for tool in tools],
            "max_tokens": read_limit(said, "max_output_tokens"),
            "stop": [],
        }
        return Request(neutral, sorted(_RESPONSES_REPLACED & said.keys()), bool(said.get("stream")))

    def answer(self, answer: CallAnswer) -> JsonObject:
        prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
        usage: JsonObject = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
        usage["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        is_cut = answer.finish_reason == "length"
        response = _response(f"resp_{answer.call}", "incomplete" if is_cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return {**response, "output": _output_items(answer), "usage": usage}

    def stream(self, answer: CallAnswer, request: Request) -> Iterator[bytes]:
        whole, numbers = self.answer(answer), itertools.count()
        for one in _events(whole):
            yield event({**one, "sequence_number": next(numbers)})

    def error_event(self, refusal: Refusal) -> bytes:
        is_known = refusal.code == "context_length_exceeded"
        error = {"code": refusal.code if is_known else "invalid_prompt", "message": refusal.message}
        response = {**_response("resp_refused", "failed"), "error": error}
        return event({"type": "response.failed", "sequence_number": 0, "response": response})


def _read_input(said: JsonObject) -> list[JsonObject]:
    instructions = read_text(said.get("instructions", ""), "instructions")
    messages: list[JsonObject] = [{"role": "system", "content": instructions}] if instructions else []
    items = said.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": read_text(items, "input")}]
    for index, item in enumerate(read_list(items, "input", 1)):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[JsonObject], item: JsonObject, where: str) -> None:
    """Adds an item. The reasoning, text and calls of one answer are items of their own, which become one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        name = read_text(item.get("call_id"), f"{where}.call_id")
        content = read_text(item.get("output"), f"{where}.output", _TEXTS)
        messages.append({"role": "tool", "content": content, "tool_call_id": name})
    elif kind == "function_call":
        fields = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
        call = {name: read_text(value, f"{where}.{name}") for name, value in fields.items()}
        _open_answer(messages, ()).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if text := read_text(parts, where, ("reasoning_text", "summary_text")):
            _open_answer(messages, ("reasoning", "content", "tool_calls"))["reasoning"] = text
    elif kind != "message" or str(item.get("role")) not in _ROLES:
        known = "message with a role, function_call, function_call_output, reasoning"
        raise Refusal(f"{where}: must be one of {known}, not {kind!r:.50}", param=where)
    else:
        role, text = _ROLES[item["role"]], read_text(item.get("content", ""), f"{where}.content", _TEXTS)
        if role == "assistant":
            _open_answer(messages, ("content", "tool_calls"))["content"] = text
        else:
            messages.append({"role": role, "content": text})


def _open_answer(messages: list[JsonObject], closed_by: Collection[str]) -> JsonObject:
    """Returns the assistant's message that an item belongs to: the last one, unless it has what is `closed_by`."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(key) for key in closed_by):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _response(name: str, status: str) -> JsonObject:
    own = {"id": name, "object": "response", "created_at": int(time.time()), "model": MODEL, "status": status}
    given = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "instructions": None, "metadata": {}}
    return {**own, **given, "error": None, "incomplete_details": None, "output": [], "usage": None}


def _output_items(answer: CallAnswer) -> list[JsonObject]:
    said, number = json.loads(answer.message_json), answer.call
    items: list[JsonObject] = []
    if said.get("reasoning"):
        part = {"type": "reasoning_text", "text": said["reasoning"]}
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [part]})
    if said["content"] or not said.get("tool_calls"):  # clients expect some text
        part = {"type": "output_text", "text": said["content"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]})
    for call in said.get("tool_calls", ()):
        named = {"call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}
        items.append({"type": "function_call", "id": f"fc_{call['id']}", **named})
    return [{**item, "status": "completed"} for item in items]


def _events(whole: JsonObject) -> Iterator[JsonObject]:
    """Yields the events of a response. Clients take the answer from items, from the pieces of text, or from the end."""
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for index, item in enumerate(whole["output"]):
        key = "arguments" if "arguments" in item else "content"
        start = {**item, "status": "in_progress", key: "" if key == "arguments" else []}
        at: JsonObject = {"item_id": item["id"], "output_index": index}
        yield {"type": "response.output_item.added", "output_index": index, "item": start}
        if key == "arguments":
            kind, text = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{kind}.delta", **at, "delta": text}
            yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": text}
        else:
            yield from _text_events(item["content"][0], {**at, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _text_events(part: JsonObject, at: JsonObject) -> Iterator[JsonObject]:
    kind, more = part["type"], {"logprobs": []} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"response.{kind}.delta", **at, "delta": part["text"], **more}
    yield {"type": f"response.{kind}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": part}
