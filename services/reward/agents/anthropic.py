"""Anthropic's Messages, and their count of tokens."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

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

_REPLACED = {"temperature", "top_p", "top_k", "thinking", "output_config"}
_KNOWN = {"model", "messages", "system", "tools", "stream", "max_tokens", "stop_sequences", "metadata", "service_tier"}
_KNOWN |= {"cache_control", "context_management", "inference_geo", *_REPLACED}
_ROLES = ("user", "assistant", "system")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
# Programs with this API recognize an overflow by these words, and compact then.
_TOO_LONG = "prompt is too long: "
# Of reasoning. Some clients send reasoning that has none back as a message of the user.
_SIGNATURE = "none"


class Messages(Dialect):
    """POST /v1/messages."""

    keep_alive = event({"type": "ping"})

    def read(self, body: bytes, drops: Drops) -> Request:
        said = read_object(body, _KNOWN, drops.fields)
        _check_context(said)
        system = read_text(said.get("system", ""), "system")
        messages = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(read_list(said.get("messages"), "messages", 1)):
            messages += _read_message(message, f"messages[{index}]")
        if not messages or messages[-1]["role"] == "assistant":
            raise Refusal("messages: the last must not be of the assistant, to be continued", param="messages")
        tools = [tool for tool in read_list(said.get("tools", []), "tools") if not _is_dropped(tool, drops.tools)]
        neutral = {
            "messages": messages,
            "tools": [
                read_tool(tool if tool.get("type", "custom") == "custom" else {}, tool.get("type"), "input_schema")
                for tool in tools
            ],
            "max_tokens": read_limit(said, "max_tokens"),
            "stop": read_stop(said, "stop_sequences"),
        }
        return Request(neutral, sorted(_REPLACED & said.keys()), bool(said.get("stream")))

    def answer(self, answer: CallAnswer) -> JsonObject:
        stop = answer.stop_sequence or None
        reason = "stop_sequence" if stop else _STOP_REASONS[answer.finish_reason]
        head = {"id": f"msg_{answer.call}", "type": "message", "role": "assistant", "model": MODEL}
        usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled_tokens}
        return {**head, "content": _blocks(answer), "stop_reason": reason, "stop_sequence": stop, "usage": usage}

    def stream(self, answer: CallAnswer, request: Request) -> Iterator[bytes]:
        message = self.answer(answer)
        usage, end = message["usage"], {key: message[key] for key in ("stop_reason", "stop_sequence")}
        empty = {**message, "content": [], **dict.fromkeys(end), "usage": {**usage, "output_tokens": 0}}
        yield event({"type": "message_start", "message": empty})
        for index, block in enumerate(message["content"]):
            start, deltas = _start_and_deltas(block)
            yield event({"type": "content_block_start", "index": index, "content_block": start})
            for delta in deltas:
                yield event({"type": "content_block_delta", "index": index, "delta": delta})
            yield event({"type": "content_block_stop", "index": index})
        yield event({"type": "message_delta", "delta": end, "usage": usage})
        yield event({"type": "message_stop"})

    def error(self, refusal: Refusal) -> JsonObject:
        kind = _ERRORS.get(refusal.status, "invalid_request_error")
        message = (_TOO_LONG if refusal.code == "context_length_exceeded" else "") + refusal.message
        return {"type": "error", "error": {"type": kind, "message": message}}


class CountTokens(Messages):
    """POST /v1/messages/count_tokens."""

    def read(self, body: bytes, drops: Drops) -> Request:
        return replace(super().read(body, drops), streams=False, counts=True)

    def answer(self, answer: CallAnswer) -> JsonObject:
        return {"input_tokens": answer.num_prompt_tokens}


def _check_context(said: JsonObject) -> None:
    """Raises Refusal if the context is to be edited, or the answer constrained."""
    management, output = said.get("context_management", {}), said.get("output_config", {})
    edits = management.get("edits", []) if isinstance(management, dict) else management
    keeps_all = {"type": "clear_thinking_20251015", "keep": "all"}
    is_known = isinstance(management, dict) and management.keys() <= {"edits"} and isinstance(edits, list)
    if not is_known or any(edit != keeps_all for edit in edits):
        raise unsupported("context_management", management)
    if not isinstance(output, dict) or output.keys() - {"effort"}:
        raise unsupported("output_config", output)


def _is_dropped(tool: JsonObject, drop_tools: Collection[str]) -> bool:
    """Returns whether the tool's type, with or without its date, is to be dropped."""
    kind = str(tool.get("type", "custom"))
    return kind in drop_tools or re.sub(r"_\d{8}$", "", kind) in drop_tools


def _read_message(message: JsonObject, where: str) -> list[JsonObject]:
    """Returns the messages that one becomes: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise Refusal(f"{where}: must have a role: {', '.join(_ROLES)}", param=where)
    if isinstance(content, str):
        return [{"role": role, "content": read_text(content, f"{where}.content")}]
    blocks = read_list(content, f"{where}.content")
    if role == "assistant":
        return [_read_assistant(blocks, f"{where}.content")]
    read: list[JsonObject] = []
    for index, block in enumerate(blocks):
        at = f"{where}.content[{index}]"
        if block.get("type") == "tool_result" and role == "user":
            name = read_text(block.get("tool_use_id"), f"{at}.tool_use_id")
            text = read_text(block.get("content") or "", f"{at}.content")
            read.append({"role": "tool", "content": text, "tool_call_id": name})
            continue
        text = read_text([block], at)
        if read and read[-1]["role"] == role:
            read[-1]["content"] += text
        else:
            read.append({"role": role, "content": text})
    return read or [{"role": role, "content": ""}]


def _read_assistant(blocks: list[JsonObject], where: str) -> JsonObject:
    read: JsonObject = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        at, kind = f"{where}[{index}]", block.get("type")
        if kind == "thinking":
            read["reasoning"] = read.get("reasoning", "") + read_text(block.get("thinking"), f"{at}.thinking")
        elif kind == "tool_use":
            call: JsonObject = {name: read_text(block.get(name), f"{at}.{name}") for name in ("id", "name")}
            call["arguments"] = json.dumps(block.get("input", {}))
            read.setdefault("tool_calls", []).append(call)
        else:
            read["content"] += read_text([block], at)
    return read


def _blocks(answer: CallAnswer) -> list[JsonObject]:
    said = json.loads(answer.message_json)
    blocks: list[JsonObject] = []
    if said.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": said["reasoning"], "signature": _SIGNATURE})
    if said["content"] or not said.get("tool_calls"):  # clients expect some text
        blocks.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls", ()):
        name = {"id": call["id"], "name": call["name"]}
        blocks.append({"type": "tool_use", **name, "input": json.loads(call["arguments"])})
    return blocks


def _start_and_deltas(block: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
    """Returns a block as it begins in a stream, and what is then added to it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    key = block["type"]
    deltas = [{"type": f"{key}_delta", key: block[key]}]
    if key == "thinking":
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, key: "", "signature": ""}, deltas
    return {**block, key: ""}, deltas
