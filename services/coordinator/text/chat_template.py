"""Renders messages to text with a model's chat template, in the sandbox of transformers.

There are two differences to `apply_chat_template`. The date comes from the config instead of the clock, so that a
resumed run sees the same prompts. And the arguments of tool calls are objects, which templates expect, also where
messages have them as JSON, like those of OpenAI's API; vLLM's server does the same.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2.meta import find_undeclared_variables

from services.common.errors import InvalidInput
from services.common.json_values import JsonMapping, JsonObject
from services.common.tool_syntax import is_deep
from services.coordinator.compat import compile_template

Message = JsonMapping
"""`role`, `content` and any other key that the template uses."""


class TemplateRefusal(InvalidInput):
    """The template rejects these messages."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: The template's Jinja source.
        special_tokens: Variables such as bos_token and eos_token.
        date: Date that `strftime_now` formats, for templates that use it.

    Raises:
        InvalidInput: `source` is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], date: datetime.date | None = None):
        self.source, self._date = source, date
        # Templates use these without asking whether they are defined, because apply_chat_template always defines them.
        self._constants = {**special_tokens, "tools": None, "documents": None, "strftime_now": self._strftime_now}
        try:
            self._template = compile_template(source)
            self.variables = frozenset(find_undeclared_variables(self._template.environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            message = f"the chat template is not valid Jinja, line {error.lineno}: {error.message}"
            raise InvalidInput(message, field="data.chat_template") from error
        except RecursionError as error:
            raise InvalidInput("the chat template nests too deeply", field="data.chat_template") from error
        except Exception as error:  # of Python, for what Jinja compiles without a look, such as a break outside a loop
            message = f"the chat template cannot be compiled: {error!r}"
            raise InvalidInput(message, field="data.chat_template") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """Renders `messages`, followed by the header of the assistant's turn if `add_generation_prompt`.

        Raises:
            TemplateRefusal: The template rejects these messages.
            InvalidInput: The template does not use a name in `variables`, or needs a date and none was given.
        """
        if unknown := sorted(variables.keys() - self.variables):
            message = f"the chat template has no variable {unknown[0]}; it has {', '.join(sorted(self.variables))}"
            raise InvalidInput(message, field="data.chat_template_kwargs")
        read = [_with_objects(message) for message in messages]
        inputs = {"messages": read, "add_generation_prompt": add_generation_prompt, **variables}
        try:
            return self._template.render(self._constants | inputs)
        except InvalidInput:  # raised by _strftime_now
            raise
        except Exception as error:  # Jinja's filters and the methods of values raise anything
            why = str(error) or repr(error)  # MemoryError() has no text
            raise TemplateRefusal(f"the chat template rejects these messages: {why}", field="messages") from error

    def _strftime_now(self, pattern: str) -> str:
        if self._date is None:
            message = (
                "the chat template needs today's date: set data.template_date, which stays the same when a run resumes"
            )
            raise InvalidInput(message, field="data.template_date")
        return self._date.strftime(pattern)


def read_arguments(arguments: object) -> JsonObject | None:
    """Returns the arguments of a tool call as an object, also if they are its JSON; an empty one if there are none.

    Returns None if they are something else, or nest too deeply for a template.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return cast(JsonObject, value) if isinstance(value, dict) and not is_deep(value) else None


def _with_objects(message: Message) -> Message:
    calls: Any = message.get("tool_calls")
    return {**message, "tool_calls": list(map(_with_object, calls))} if isinstance(calls, list) else message


def _with_object(call: Any) -> Any:
    """Returns a tool call with an object of arguments; as it is, if it has none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or (arguments := read_arguments(function.get("arguments"))) is None:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


_NUM_SHOWN = 30  # characters before and after the first difference
_FIX_PROMPT = (
    "Set data.chat_template_kwargs (enable_thinking) to match the messages, or data.chat_template to one that does"
)
_FIX_TURN = (
    "Set data.chat_template to one that keeps earlier turns and their thinking, or give one answer per conversation"
)


def check_prefix_stable(render: Callable[..., str], messages: Sequence[Message]) -> None:
    """Rejects a template whose training text differs from what the model sees when it answers.

    For each assistant message k, the rendering of messages[:k] with the header of the assistant's turn must be a prefix
    of the rendering of messages[:k + 1], which must be a prefix of the whole conversation's. Then the whole text has
    every turn exactly as it was rendered when it was the last: the loss mask covers a turn without its header, and
    sampled tokens stay valid while messages are added. Templates that strip earlier turns' thinking fail this check.

    Prompts for one answer need no check. To train on several turns of one text, call this for each conversation. One
    with a single turn, at its end, can only fail by the turn's header.

    Raises:
        InvalidInput: A rendering is not a prefix. The error names the message and the first characters that differ.
        TemplateRefusal: The template rejects a beginning of these messages.
    """
    whole = render(messages, add_generation_prompt=False)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = render(messages[: index + 1], add_generation_prompt=False)
        if index > 0:
            prompt = render(messages[:index])
            _require_prefix(prompt, turn, f"message {index} does not begin with its prompt", _FIX_PROMPT)
        _require_prefix(turn, whole, f"message {index} changes when messages follow", _FIX_TURN)


def _require_prefix(text: str, longer: str, problem: str, fix: str) -> None:
    if longer.startswith(text):
        return
    raise InvalidInput(
        f"the chat template is not prefix-stable: {problem}: {show_difference(text, longer)}. {fix}",
        field="data.chat_template",
    )


def show_difference(text: str, other: str) -> str:
    """Describes the first difference of two texts, with a few characters before and after it."""
    differs = (index for index, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    same = next(differs, min(len(text), len(other)))
    before = text[max(0, same - _NUM_SHOWN) : same]
    first, then = text[same : same + _NUM_SHOWN], other[same : same + _NUM_SHOWN]
    return f"after {before!r}, expected {first!r} but got {then!r}"
