"""Maps the calls of an agent to paths of tokens: which tokens a call continues, and which rows an episode becomes.

Agents send whole conversations. One that begins with a recorded conversation, the model's answer included, continues
that one's tokens; the rest is appended by the bridge, so no sampled token is ever rendered again. Any other begins a
segment of its own: a sub-agent, a compacted history, an answer that the agent has edited. Messages and tools are
without dialect, as the reward service reads them from a request.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from services.common.errors import InvalidInput
from services.common.json_values import JsonMapping
from services.common.tool_syntax import is_deep
from services.coordinator.text.bridge import Bridge, as_texts
from services.coordinator.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Call:
    """A call of the model: its conversation, the tokens of its prompt and, once it is answered, those of the answer."""

    number: int
    conversation: Sequence[JsonMapping]
    """The request's messages, and the answer once there is one."""
    tools: str
    prompt: tuple[int, ...]
    parent: "Call | None" = None
    """The call whose tokens the prompt begins with."""
    after: int = 0
    """How many calls had been answered when this one came."""
    answer: tuple[int, ...] = ()
    is_answered: bool = False
    facts: Any = None
    """What the caller wants to keep."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)

    @property
    def added(self) -> tuple[int, ...]:
        """Returns the tokens between the parent's answer and this call's; the whole prompt without a parent."""
        return self.prompt[len(self.parent.tokens) :] if self.parent else self.prompt


@dataclass(frozen=True)
class Path:
    """The calls of one row of a batch. The first `num_repeated` of them are trained in an earlier row."""

    calls: Sequence[Call]
    num_repeated: int


class Renderer:
    """Renders conversations of agents, with any tools. Keeps what it knows of the tools that it has met last.

    What is longer than `max_model_len` raises TooManyTokens, if that is certain before all of it is encoded.
    """

    def __init__(self, tokenizer: Tokenizer, variables: JsonMapping, max_model_len: int = sys.maxsize):
        self._tokenizer, self._variables = tokenizer.with_limit(max_model_len), variables
        self._bridge = lru_cache(64)(self._make_bridge)
        self._keeps = lru_cache(256)(self._check_keeps)

    def prompt(self, messages: Sequence[JsonMapping], tools: str) -> list[int]:
        """Returns the tokens of a whole conversation. Nothing that an agent writes becomes a special token.

        Messages of role system after the first become those of a user, if the template takes none there.

        Raises:
            InvalidInput: The chat template shows no tools, or rejects the messages.
            TooManyTokens: The conversation is too long.
        """
        shown = [*map(_to_template, messages[:1]), *self._for_template(messages[1:], tools)]
        return self._bridge(tools).prompt((), shown)

    def extend(
        self, tokens: Sequence[int], messages: Sequence[JsonMapping], tools: str, rest: str = ""
    ) -> list[int] | None:
        """Returns the tokens that follow an answer, which ends `tokens`; None if the template would rewrite history.

        `rest` is what the agent has written behind the answer, in the same message. Messages of role system become
        those of a user, if the template takes none there.
        """
        shown = self._for_template(messages, tools)
        if not all(self._keeps(tools, role) for role in {message["role"] for message in shown}):
            return None
        bridge = self._bridge(tools)
        written = bridge.extend(tokens, [{"role": "", "content": rest}]) if rest else []
        return [*written, *bridge.extend([*tokens, *written], shown)]

    def text_after(self, answer: Sequence[int], shown: str) -> str | None:
        """Returns what was sampled after the text that an agent was shown of an answer; None if nothing can follow it,
        because the model has ended its turn."""
        if not shown or not answer or answer[-1] in self._tokenizer.eos_token_ids:
            return None
        _, found, after = self._tokenizer.decode(list(answer), skip_special_tokens=False).rpartition(shown)
        return after if found else None

    def _for_template(self, messages: Sequence[JsonMapping], tools: str) -> Sequence[JsonMapping]:
        """Returns messages after the first as the template takes them."""
        shown = [dict(_to_template(message)) for message in messages]
        for message in shown:
            if message["role"] == "system" and not self._keeps(tools, "system"):
                message["role"] = "user"
        return shown

    def _make_bridge(self, tools: str) -> Bridge:
        return Bridge(self._tokenizer, as_texts(self._tokenizer, json.loads(tools)), self._variables)

    def _check_keeps(self, tools: str, role: str) -> bool:
        try:
            self._bridge(tools).check([role])
        except InvalidInput:
            return False
        return True


@dataclass
class Threads:
    """The calls of one episode, in the order in which they came."""

    renderer: Renderer
    calls: list[Call] = field(default_factory=list)

    @property
    def num_segments(self) -> int:
        """Returns the number of rows that the calls become: one call continues the row of each parent."""
        return len(self.calls) - len({id(call.parent) for call in self.calls if call.parent})

    def add(self, number: int, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping]) -> Call:
        """Adds a call, which has no answer yet.

        Raises:
            InvalidInput: The chat template shows no tools, or rejects the messages.
            TooManyTokens: They are too long.
        """
        call = self.place(number, messages, tools)
        self.calls.append(call)
        return call

    def place(self, number: int, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping]) -> Call:
        """Returns the call that `add` would add. Raises as `add` does."""
        conversation, shown = list(map(_canonical, messages)), json.dumps(tools)
        parent, rest = self._find_parent(conversation, shown)
        prompt: tuple[int, ...] = ()
        if parent:
            added = self.renderer.extend(parent.tokens, messages[len(parent.conversation) :], shown, rest)
            prompt = (*parent.tokens, *added) if added is not None else ()
        if not prompt:
            parent, prompt = None, tuple(self.renderer.prompt(messages, shown))
        after = sum(call.is_answered for call in self.calls)
        return Call(number, conversation, shown, prompt, parent, after)

    def occurrence(self, call: Call) -> int:
        return sum(other.prompt == call.prompt for other in self.calls[: self.calls.index(call)])

    def drop(self, call: Call) -> None:
        self.calls.remove(call)

    def paths(self) -> list[Path]:
        """Returns the rows that the answered calls become. Each call is trained in exactly one of them.

        The order, and which of several calls continues a row, depend on tokens and not on which of them came first
        while none of them was answered.
        """
        roots = sorted((call for call in self.calls if call.is_answered and call.parent is None), key=_sort_key)
        return [path for root in roots for path in self._paths_from([root], 0)]

    def _paths_from(self, calls: list[Call], num_repeated: int) -> Iterator[Path]:
        followers = [call for call in self.calls if call.is_answered and call.parent is calls[-1]]
        if not followers:
            yield Path(calls, num_repeated)
        for index, follower in enumerate(sorted(followers, key=_sort_key)):
            yield from self._paths_from([*calls, follower], len(calls) if index else num_repeated)

    def _find_parent(self, conversation: Sequence[JsonMapping], tools: str) -> tuple[Call | None, str]:
        """Returns the call with the longest conversation that this one begins with, if nothing of the model follows;
        and what the agent has written behind its answer.

        Returns None if several have other tokens: it is unknown which of them the agent has continued.
        """
        found: list[tuple[Call, str]] = []
        for call in self.calls:
            is_open = call.is_answered and call.tools == tools and len(call.conversation) < len(conversation)
            if is_open and (rest := self._rest(call, conversation)) is not None:
                found.append((call, rest))
        length, least = max(((len(call.conversation), -len(rest)) for call, rest in found), default=(0, 0))
        found = [(call, rest) for call, rest in found if (len(call.conversation), -len(rest)) == (length, least)]
        is_continued = all(message["role"] != "assistant" for message in conversation[length:])
        is_known = len({call.tokens for call, _ in found}) == 1
        return found[0] if is_continued and is_known else (None, "")

    def _rest(self, call: Call, conversation: Sequence[JsonMapping]) -> str | None:
        """Returns what an agent has written behind the answer of a call, within its message; None if `conversation`
        does not continue the call.

        Some agents add to an answer that a text of `stop` or a limit has ended. The same text follows then as the chat
        template would show, so it is appended to what was sampled.
        """
        *before, known = call.conversation
        sent = conversation[len(before)]
        if not all(map(_same_message, before, conversation)):
            return None
        if _same_message(known, sent):
            return ""
        shown = known["content"] + known.get("stop", "")
        is_more = sent["content"].startswith(shown) and "tool_calls" not in known
        if not is_more or not _same_message(known, {**sent, "content": known["content"]}):
            return None
        rest, sampled = sent["content"][len(shown) :], self.renderer.text_after(call.answer, shown)
        return rest[len(sampled) :] if sampled is not None and rest.startswith(sampled) else None


def close(call: Call, answer: Sequence[int], message: JsonMapping, facts: object, stop: str = "") -> None:
    """Records the answer of a call: its tokens, the message that the agent gets, and the text of the request's `stop`
    that has ended it, which is not in the message.
    """
    call.answer, call.facts, call.is_answered = tuple(answer), facts, True
    call.conversation = [*call.conversation, {**_canonical(message), **({"stop": stop} if stop else {})}]


def _sort_key(call: Call) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return call.after, call.prompt, call.answer


def _canonical(message: JsonMapping) -> JsonMapping:
    """Returns a message with the arguments of its calls as values: 5000.0 is 5000, in any order of keys."""
    calls = [{**call, "arguments": _value(call["arguments"])} for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _value(arguments: str) -> str:
    def number(text: str) -> float | int:
        value = float(text)  # all numbers of JavaScript's clients are of this type
        return int(value) if value.is_integer() else value

    try:
        return json.dumps(json.loads(arguments, parse_float=number, parse_int=number), sort_keys=True)
    except (ValueError, OverflowError, RecursionError):
        return arguments


def _same_message(known: JsonMapping, sent: JsonMapping) -> bool:
    """Returns whether a client that knows a message has sent it.

    Most clients do not send reasoning back, which is kept then as it was sampled. Some give the answer a name, or put
    the text back that has ended it.
    """
    optional = ("reasoning", "name") if known["role"] == "assistant" else ("reasoning",)
    if any(key in known and key in sent and known[key] != sent[key] for key in optional):
        return False
    one, other = ({key: value for key, value in each.items() if key not in optional} for each in (known, sent))
    stop = one.pop("stop", "")
    return other in (one, {**one, "content": one["content"] + stop})


def _to_template(message: JsonMapping) -> JsonMapping:
    """Returns a message as chat templates take it, with arguments as objects."""
    shown = {key: value for key, value in message.items() if key not in ("tool_calls", "reasoning")}
    if "reasoning" in message:
        shown["reasoning_content"] = message["reasoning"]
    if "tool_calls" in message:
        shown["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": _arguments(call)}}
            for call in message["tool_calls"]
        ]
    return shown


def _arguments(call: JsonMapping) -> object:
    """Returns the arguments of a call as a value; as text, if they are no JSON or too deep for what walks over them."""
    try:
        value = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]
    return call["arguments"] if is_deep(value) else value
