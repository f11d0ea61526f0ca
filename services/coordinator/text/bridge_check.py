"""Checks that a chat template renders a conversation as the bridge puts it together."""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product
from typing import NoReturn, Protocol

from services.common.errors import InvalidInput
from services.coordinator.text.chat_template import Message, TemplateRefusal, show_difference

ANSWER = "LockstepAnswer"
"""Text that can be found in rendered conversations, because no template changes letters."""
QUESTION: Message = {"role": "user", "content": "LockstepQuestion"}
SYSTEM: Message = {"role": "system", "content": "LockstepSystem"}


def answer(text: str) -> Message:
    """Returns an assistant's turn."""
    return {"role": "assistant", "content": text}


def call(name: str) -> Message:
    """Returns an assistant's turn that calls the tool `name` and says nothing else."""
    function = {"name": name, "arguments": {}}
    calls = [{"id": _call_id(0), "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Adds a `tool_call_id` to tool messages without one, which some templates require."""
    return [
        {"tool_call_id": _call_id(index), **message} if message["role"] == "tool" else message
        for index, message in enumerate(messages)
    ]


def _call_id(index: int) -> str:
    return f"call{index:05d}"  # Mistral's templates take 9 letters and digits only


_THINKING = "<think>\nEasy.\n</think>\n\n"
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": null}}\n</tool_call>'
_SAID = ("Paris.", _THINKING + "Paris.", "", "  Paris \n\n", "Zoë 🎉 漢字", _CALL, _THINKING + _CALL, "<think>\nEasy")
_SAID += ("<|channel|>final<|message|>4", "<answer>4</answer>", "```python\n1\n```", "\\boxed{4}", "[TOOL_CALLS][]")
_SAID += ("So [THINK]x[/THINK]4", "<tool_response>\n4\n</tool_response>", "### {{ 1 }}\n\n- 4")
_LONG = 12
"""Number of turns of a long conversation."""


class Renders(Protocol):
    """A Bridge; see there."""

    @property
    def end_text(self) -> str: ...
    def render(self, messages: Sequence[Message]) -> str: ...
    def after_turn(self, messages: Sequence[Message]) -> str: ...


def check_keeps_turns(bridge: Renders, roles: Sequence[str], *, with_system: bool) -> None:
    """Compares whole made-up conversations of 1, 2 and 12 turns with what `bridge` puts together; see Bridge.check.

    Raises:
        InvalidInput: They differ, or the template rejects or leaves out a message.
    """
    for role in roles:
        _check_shown(bridge, role)
    first = [SYSTEM, QUESTION] if with_system else [QUESTION]
    texts = list(_texts(bridge.render(first)))
    for said in texts:
        for order in (*product(roles), *product(roles, repeat=2)):
            _check_conversation(bridge, first, order, [said])
    for order in ([role] * _LONG for role in roles):
        _check_conversation(bridge, first, order, [texts[0]])
        _check_conversation(bridge, first, order, texts)
    _check_conversation(bridge, first, [*islice(cycle(roles), _LONG)], texts[::-1])


def _check_shown(bridge: Renders, role: str) -> None:
    try:
        text = bridge.after_turn([{"role": role, "content": "LockstepReply"}])
    except TemplateRefusal as error:
        _refuse(f"rejects messages of role {role} after the assistant's turn ({error.message})", "takes them")
    if "LockstepReply" not in text:
        _refuse(f"leaves out messages of role {role}", "shows them")


def _texts(prompt: str) -> Iterator[str]:
    begins_thinking = prompt.rstrip().endswith("<think>")
    for said in _SAID:
        if not begins_thinking:
            yield said
        elif not said.startswith("<think>"):
            yield _THINKING.removeprefix("<think>\n") + said


def _check_conversation(bridge: Renders, first: Sequence[Message], order: Sequence[str], texts: Sequence[str]) -> None:
    """Compares a conversation with replies of these roles, in which the assistant says `texts`, over and over."""
    said = with_call_ids([{"role": role, "content": f"LockstepReply{index}"} for index, role in enumerate(order)])
    replies = [[reply] for reply in said]
    turns = [answer(said) for said, _ in zip(cycle(texts), order, strict=False)]
    try:
        whole = bridge.render(_conversation(first, turns, replies))
    except TemplateRefusal:
        # Some accept a tool's result only after a call that they render themselves.
        turns = [call(ANSWER) if role == "tool" else turn for role, turn in zip(order, turns, strict=True)]
        try:
            whole = bridge.render(_conversation(first, turns, replies))
        except TemplateRefusal as error:
            _refuse(f"rejects an environment's replies {', '.join(order)} ({error.message})", "takes them")
    _compare(bridge, first, turns, replies, whole)


def check_episode(
    bridge: Renders, first: Sequence[Message], turns: Sequence[str], replies: Sequence[Sequence[Message]]
) -> None:
    """Compares a conversation that was played with what the template makes of the whole; see Bridge.check.

    It is not compared if the template takes results only of calls that it renders itself.

    Raises:
        InvalidInput: They differ.
    """
    answers = list(map(answer, turns))
    try:
        whole = bridge.render(_conversation(first, answers, list(map(with_call_ids, replies))))
    except TemplateRefusal:
        return
    _compare(bridge, first, answers, replies, whole)


def _compare(
    bridge: Renders,
    first: Sequence[Message],
    turns: Sequence[Message],
    replies: Sequence[Sequence[Message]],
    whole: str,
) -> None:
    rest = _remove(bridge.render(first), whole)
    for turn, reply in zip(turns, replies, strict=True):
        text = turn["content"].strip()
        if "tool_calls" in turn:
            rest = rest[max(0, rest.find(bridge.end_text)) :]
        else:
            rest = _remove(text, rest.lstrip()).lstrip()
        rest = _remove(bridge.after_turn(reply), rest)
    _remove(rest, "")


def _conversation(
    first: Sequence[Message], turns: Sequence[Message], replies: Sequence[Sequence[Message]]
) -> list[Message]:
    return [*first, *(message for turn, reply in zip(turns, replies, strict=True) for message in (turn, *reply))]


def _remove(expected: str, rest: str) -> str:
    if rest.startswith(expected):
        return rest[len(expected) :]
    where = show_difference(expected, rest)
    if "think>" in where:
        _refuse(f"removes or changes <think> of earlier turns: {where}", "keeps it", contradicts=True)
    if QUESTION["content"] in expected or SYSTEM["content"] in expected:
        what = "changes the first prompt when messages follow, such as its tools or system message"
        _refuse(f"{what}: {where}", "keeps it", contradicts=True)
    _refuse(f"changes earlier turns when messages follow: {where}", "keeps them", contradicts=True)


def _refuse(fault: str, remedy: str, *, contradicts: bool = False) -> NoReturn:
    why = ", so a later turn would contradict the tokens that were sampled" if contradicts else ""
    raise InvalidInput(
        f"the chat template {fault}{why}: set data.chat_template to one that {remedy}", field="data.chat_template"
    )
