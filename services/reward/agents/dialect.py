"""What the dialects of the endpoint share: requests and refusals without dialect, and how keys and texts are read.

A request has messages with role, content and, where there are, tool_calls (id, name, arguments), tool_call_id, name and
reasoning; tools; max_tokens (0 for the run's own limit); stop.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from lockstep.reward.v1.agent_pb2 import CallAnswer

from services.common.config.environment import AnswerField
from services.common.json_values import JsonObject
from services.common.tool_syntax import MAX_DEPTH, is_deep

MODEL = "policy"
NO_SPECIAL_WISH: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "background": (False,),
    "modalities": (["text"],),
    "logit_bias": ({},),
}
"""Values that change nothing, of keys that are otherwise refused."""
_MAX_STOPS = 64  # the engine looks for each of them after each token, while all other requests wait
_CAN_BE_DROPPED = get_args(AnswerField)
_NO_PARAMETERS = {"type": "object", "properties": {}}


class Refusal(Exception):
    """A request that is answered with an error. SDKs do not repeat a request with status 400."""

    def __init__(self, message: str, *, status: int = 400, param: str = "", code: str = ""):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


@dataclass(frozen=True)
class Drops:
    """What is left out of requests."""

    tools: Collection[str] = ()
    """Types of tools."""
    fields: Collection[str] = ()


@dataclass(frozen=True)
class Request:
    """A request, and how its answer is to be written."""

    neutral: JsonObject
    overridden: Sequence[str] = ()
    streams: bool = False
    shows_usage: bool = False
    counts: bool = False
    """Whether only the tokens of the prompt are asked for."""


class Dialect:
    """How one API writes requests, answers and errors. The errors are OpenAI's unless a dialect has its own."""

    keep_alive = b": the model is still at work\n\n"
    """What a stream has while there is no answer yet."""

    def read(self, body: bytes, drops: Drops) -> Request:
        """Reads a request, without what it is to leave out.

        Raises:
            Refusal: It is malformed, or asks for what would change the distribution or cannot be rendered.
        """
        raise NotImplementedError

    def answer(self, answer: CallAnswer) -> JsonObject:
        """Returns the body of an answer that is not streamed."""
        raise NotImplementedError

    def stream(self, answer: CallAnswer, request: Request) -> Iterator[bytes]:
        """Yields the events of a streamed answer, which is complete when it begins."""
        raise NotImplementedError

    def error(self, refusal: Refusal) -> JsonObject:
        said = {"message": refusal.message, "type": "invalid_request_error"}
        return {"error": {**said, "param": refusal.param or None, "code": refusal.code or None}}

    def error_event(self, refusal: Refusal) -> bytes:
        """Returns the event of a refusal in a stream that has begun."""
        return event(self.error(refusal))


def event(content: JsonObject) -> bytes:
    """Returns an event of a stream, with its type as its name if it has one."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content)}\n\n".encode()


def read_object(body: bytes, known: Collection[str], dropped: Collection[str]) -> JsonObject:
    """Returns the keys of a body that are neither null nor `dropped`.

    Raises:
        Refusal: It is no JSON object, is nested too deep, or has a key that is not `known` with a value that changes
            something.
    """
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise Refusal("the body must be a JSON object")
    if is_deep(said):  # what reads or writes it again would overflow the stack
        raise Refusal(f"the body is nested more than {MAX_DEPTH} deep")
    said = {key: value for key, value in said.items() if value is not None and key not in dropped}
    for key, value in said.items():
        if key not in known and value not in NO_SPECIAL_WISH.get(key, ()) and value != []:
            raise unsupported(key, value)
    return said


def unsupported(param: str, value: object) -> Refusal:
    remedy = "; environment.drop_fields can leave it out" if param in _CAN_BE_DROPPED else ""
    message = f"{param}: {json.dumps(value)[:100]} is not supported while a model is trained{remedy}"
    return Refusal(message, param=param)


def read_limit(said: JsonObject, *keys: str) -> int:
    """Returns the lowest limit of tokens, 0 for none. Raises Refusal if one is no number above 0."""
    limits = [said[key] for key in keys if key in said]
    if not all(type(limit) is int and limit > 0 for limit in limits):
        raise Refusal(f"{keys[0]}: must be a number above 0", param=keys[0])
    return min(limits, default=0)


def read_stop(said: JsonObject, key: str) -> list[str]:
    """Returns the texts that end an answer. Raises Refusal if they are none."""
    stop = said.get(key, [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refusal(f"{key}: must be a text or a list of texts", param=key)
    if len(stop) > _MAX_STOPS:
        raise Refusal(f"{key}: must have at most {_MAX_STOPS} texts, not {len(stop)}", param=key)
    return [text.encode(errors="replace").decode() for text in stop]


def read_list(value: object, where: str, least: int = 0) -> list[JsonObject]:
    """Returns a list of objects. Raises Refusal if it is none, or has less than `least`."""
    if not isinstance(value, list) or len(value) < least or not all(isinstance(one, dict) for one in value):
        raise Refusal(f"{where}: must be a list of {'one or more ' * bool(least)}objects", param=where)
    return value


def read_text(content: object, where: str, types: Collection[str] = ("text",)) -> str:
    """Returns the text of a content, whose parts of `types` are joined. Raises Refusal for any other part."""
    parts = [content] if isinstance(content, str) else content
    if isinstance(parts, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") in types else part for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts)).encode(errors="replace").decode()
    raise Refusal(f"{where}: only text is supported", param=where)


def read_tool(tool: Mapping[str, object], kind: object, parameters: str = "parameters") -> JsonObject:
    """Returns a function as chat templates take it. Raises Refusal if a tool of type `kind` is no function."""
    if not isinstance(tool.get("name"), str):
        message = f"tools: only functions are supported, not {kind!r:.50}; environment.drop_tools can leave it out"
        raise Refusal(message, param="tools")
    schema = tool.get(parameters) or _NO_PARAMETERS
    if not isinstance(schema, Mapping):
        raise Refusal(f"tools: {parameters} of {tool['name']} must be a JSON schema, not {schema!r:.50}", param="tools")
    shown = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {"type": "function", "function": {**shown, "parameters": schema}}
