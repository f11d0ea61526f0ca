"""Extends the token stream of an episode by an environment's messages, and proves that the template agrees.

No token is rendered a second time. The tokens between two turns of the policy are those that the chat template writes
after an assistant's text in a sample conversation: the end of the turn, the new messages and the next assistant header.
They begin with a stop token. A tokenizer splits text at such an added token before anything else, so these tokens are
the same as within the tokenized whole, and the policy's own tokens stay as they were sampled.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from itertools import cycle, islice, product
from typing import Any, NoReturn

from services.common.errors import InvalidInput
from services.common.json_values import JsonMapping
from services.coordinator.text.chat_template import Message, TemplateRefusal, show_difference
from services.coordinator.text.continued import encode_after
from services.coordinator.text.tokenizer import Tokenizer

_ANSWER = "LockstepAnswer"
"""Text that can be found in rendered conversations, because no template changes letters."""
_QUESTION: Message = {"role": "user", "content": "LockstepQuestion"}
# Texts that some template changes in earlier turns: thinking, white space, calls of tools, markup of other families.
_THINKING = "<think>\nEasy.\n</think>\n\n"
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": null}}\n</tool_call>'
_SAID = ("Paris.", _THINKING + "Paris.", "", "  Paris \n\n", "Zoë 🎉 漢字", _CALL, _THINKING + _CALL, "<think>\nEasy")
_SAID += ("<|channel|>final<|message|>4", "<answer>4</answer>", "```python\n1\n```", "\\boxed{4}", "[TOOL_CALLS][]")
_SAID += ("So [THINK]x[/THINK]4", "<tool_response>\n4\n</tool_response>", "### {{ 1 }}\n\n- 4")
# Turns of a long conversation: some templates change a turn only once several others follow it.
_LONG = 12
_ANCHOR = "a"


class Bridge:
    """Tokenizes first prompts, and the text that follows a turn of the policy: raw text only without a chat template.

    `tools` are JSON schemas, which the chat template shows; none for tools that the prompt describes. `variables` are
    further ones of the template, such as enable_thinking (`data.chat_template_kwargs`).

    Raises:
        InvalidInput: There are `tools` and the chat template does not show any.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Message] = (), variables: JsonMapping | None = None):
        self._tokenizer = tokenizer.with_tools(tools) if tools else tokenizer
        self._variables = dict(variables or {})

    def render(self, messages: Sequence[Message]) -> str:
        """Renders `messages` with the tools and variables, followed by the assistant header.

        Raises:
            InvalidInput: See Tokenizer.render.
        """
        return self._tokenizer.render(messages, **self._variables)

    def prompt(self, messages: Sequence[Message], said: Sequence[Message] = ()) -> list[int]:
        """Returns the tokens of a first prompt, up to the first token to sample.

        The messages that the environment has `said` follow the `messages` of the data; they cannot write special
        tokens. Messages with an empty role are raw text, which comes last, after the assistant header.

        Raises:
            InvalidInput: The chat template rejects the messages, there is none, or raw text precedes a message.
        """
        messages = [*messages, *self._as_texts(said)]
        num_templated = sum(1 for message in messages if message["role"])
        templated, raw = messages[:num_templated], messages[num_templated:]
        if any(message["role"] for message in raw):
            raise InvalidInput(
                "messages: a message follows raw text: if that is the prompt of a row, set data.chat, which makes a "
                "user's message of it",
                field="data.chat",
            )
        text = "".join(message["content"] for message in raw)
        return self._tokenizer.encode_marked(self.render(templated)) + self._raw(text)

    def extend(self, stream: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Returns the tokens to append to `stream`, which ends with a turn of the policy, for the policy's next turn.

        These are the end of the turn if `stream` does not end with it (the turn was truncated, or ended by a stop
        string or by another stop token), the new messages and the next assistant header. Messages with an empty role
        are raw text, which continues the turn: they are tokenized alone, and nothing else is added. A special token
        that is spelled in a message stays text. A `tool_call_id` is made up for tool messages that have none.

        Raises:
            InvalidInput: There is no message, one of the assistant, or raw text among other messages; or the template
                does not write the end of a turn.
            TemplateRefusal: The chat template rejects the messages.
        """
        roles = {message["role"] for message in messages}
        if not roles or "assistant" in roles or ("" in roles and len(roles) > 1):
            wrong = "mix raw text and messages" if "" in roles else "have a message of the assistant"
            raise InvalidInput(
                f"messages: an environment's reply {f'must not {wrong}' if roles else 'needs a message'}",
                field="messages",
            )
        said = self._as_texts(messages)
        if roles == {""}:
            return self._raw("".join(message["content"] for message in said))
        tokens = self._tokenizer.encode_marked(self.after_turn(said))
        return tokens[1:] if stream[-1] == self.end_token else tokens

    def check(self, roles: Collection[str]) -> None:
        """Proves on sample conversations that the chat template fulfills the assumptions of `extend`.

        In the rendering of a whole conversation, the first prompt must be as it was rendered alone, each turn of the
        assistant must be the text that was said (but for white space around it) and a stop token, and the text between
        must be what `extend` appends. Templates that remove thinking from earlier turns fail, if a message of `roles`
        makes them do so. These are the roles of the messages that the environment may send; raw text (an empty role)
        needs no check.

        Raises:
            InvalidInput: The message says what the template does, and shows the first difference.
        """
        templated = sorted(role for role in set(roles) if role)
        if templated and self._tokenizer.has_chat_template:
            _check_keeps_turns(self, templated)

    def check_episode(
        self,
        messages: Sequence[Message],
        said: Sequence[Message],
        turns: Sequence[Sequence[int]],
        replies: Sequence[Sequence[Message]],
    ) -> None:
        """Compares an episode that was played with what the chat template makes of the whole conversation.

        Both must be the same, but for white space around the assistant's text. Otherwise a program that renders the
        conversation shows the model another text than it was trained on. Raw text, and turns that continue a message,
        are not compared. `said` are the environment's first messages, after `messages` of the data, and `replies` those
        after each of `turns`, which are the policy's tokens of each turn but the last.

        Raises:
            InvalidInput: The message shows the first difference.
        """
        first = [*messages, *self._as_texts(said)]
        if (
            not turns
            or first[-1]["role"] == "assistant"
            or not all(message["role"] for some in (first, *replies) for message in some)
        ):
            return
        ends = self._tokenizer.eos_token_ids
        texts = [turn[:-1] if turn[-1] in ends else turn for turn in turns]
        shown = [_answer(self._tokenizer.decode(turn, skip_special_tokens=False)) for turn in texts]
        sent = list(map(self._as_texts, replies))
        try:
            whole = self.render(_conversation(first, shown, list(map(with_call_ids, sent))))
        except TemplateRefusal:  # some templates take results only of calls that they render themselves
            return
        _compare(self, first, shown, sent, whole)

    def after_turn(self, messages: Sequence[Message]) -> str:
        """Returns the text from the end of an assistant's turn to the next assistant header, with `messages` in it.

        Raises:
            InvalidInput: See `extend`.
        """
        messages, end = with_call_ids(messages), self.end_text
        try:
            text = self.render([_QUESTION, _answer(_ANSWER), *messages])
        except TemplateRefusal:
            if messages[0]["role"] != "tool":
                raise
            text = self.render([_QUESTION, _call(_ANSWER), *messages])  # some take results only of calls that they saw
        begin = text.find(end, text.find(_ANSWER))
        if _ANSWER not in text or begin < 0:
            message = (
                "the chat template does not keep the assistant's turn when messages follow: set data.chat_template"
            )
            raise InvalidInput(message, field="data.chat_template")
        return text[begin:]

    @cached_property
    def end_token(self) -> int:
        """The stop token that the template writes at the end of an assistant's turn.

        Raises:
            InvalidInput: It writes something else.
        """
        rendered = self._tokenizer.render(
            [_QUESTION, _answer(_ANSWER), _QUESTION], add_generation_prompt=False, **self._variables
        )
        after = rendered.partition(_ANSWER)[2]
        tokens = self._tokenizer.encode(after)
        is_stop = bool(tokens) and tokens[0] in self._tokenizer.eos_token_ids
        # The text must have the same tokens after other text, too.
        if is_stop and self._tokenizer.encode(_ANCHOR + after) == self._tokenizer.encode(_ANCHOR) + tokens:
            return tokens[0]
        stops = [self._text_of(token) for token in self._tokenizer.eos_token_ids]
        shown = self._text_of(tokens[0]) if tokens else ""
        raise InvalidInput(
            f"the chat template ends an assistant's turn with {shown!r}, which is not a stop token of the model "
            f"({', '.join(stops)}): add it to eos_token_id in generation_config.json, or set data.chat_template to one "
            "that ends a turn with a stop token",
            field="data.chat_template",
        )

    @property
    def end_text(self) -> str:
        return self._text_of(self.end_token)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _as_texts(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages of the environment's in which special tokens are marked as text.

        Raw texts that follow each other become one, because a token may be spelled across them.
        """
        joined: list[Message] = []
        for message in messages:
            if joined and not message["role"] and not joined[-1]["role"]:
                message = {**message, "content": joined.pop()["content"] + message["content"]}
            joined.append(message)
        mark = partial(as_texts, self._tokenizer)
        return [{key: value if key == "role" else mark(value) for key, value in one.items()} for one in joined]

    def _raw(self, text: str) -> list[int]:
        return encode_after(self._tokenizer.encode_marked, [_ANCHOR], text)


def as_texts(tokenizer: Tokenizer, value: object) -> Any:
    """Returns a value in which special tokens are marked as text, in lists and objects too; see Tokenizer.as_text."""
    return map_texts(tokenizer.as_text, value)


def map_texts(change: Callable[[str], str], value: object) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(change, entry) for entry in value]
    if isinstance(value, dict):
        return {map_texts(change, key): map_texts(change, entry) for key, entry in value.items()}
    return value


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(name: str) -> Message:
    """An assistant's turn that calls the tool `name` and says nothing else."""
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


def _check_keeps_turns(bridge: Bridge, roles: Sequence[str]) -> None:
    """Compares whole sample conversations of 1, 2 and 12 turns with what `bridge` puts together; see Bridge.check."""
    for role in roles:
        _check_shown(bridge, role)
    first = [_QUESTION]
    texts = _texts(bridge.render(first))
    for said in texts:
        for order in (*product(roles), *product(roles, repeat=2)):
            _check_conversation(bridge, first, order, [said])
    for order in ([role] * _LONG for role in roles):
        _check_conversation(bridge, first, order, [texts[0]])
        _check_conversation(bridge, first, order, texts)
    _check_conversation(bridge, first, [*islice(cycle(roles), _LONG)], texts[::-1])


_OR_FEWER = "them, or set the class attribute `roles` of your environment to the roles that it sends"


def _check_shown(bridge: Bridge, role: str) -> None:
    try:
        text = bridge.after_turn([{"role": role, "content": "LockstepReply"}])
    except TemplateRefusal as error:
        _refuse(f"rejects messages of role {role} after the assistant's turn ({error.message})", f"takes {_OR_FEWER}")
    if "LockstepReply" not in text:
        _refuse(f"leaves out messages of role {role}", f"shows {_OR_FEWER}")


def _texts(prompt: str) -> Sequence[str]:
    if not prompt.rstrip().endswith("<think>"):
        return _SAID
    # The prompt begins the thinking, so each turn ends it first.
    return [_THINKING.removeprefix("<think>\n") + said for said in _SAID if not said.startswith("<think>")]


def _check_conversation(bridge: Bridge, first: Sequence[Message], order: Sequence[str], texts: Sequence[str]) -> None:
    """Compares a conversation with replies of these roles, in which the assistant says `texts`, over and over."""
    said = with_call_ids([{"role": role, "content": f"LockstepReply{index}"} for index, role in enumerate(order)])
    replies = [[reply] for reply in said]
    turns = [_answer(said) for said, _ in zip(cycle(texts), order, strict=False)]
    try:
        whole = bridge.render(_conversation(first, turns, replies))
    except TemplateRefusal:
        # Some accept a tool's result only after a call that they render themselves.
        turns = [_call(_ANSWER) if role == "tool" else turn for role, turn in zip(order, turns, strict=True)]
        try:
            whole = bridge.render(_conversation(first, turns, replies))
        except TemplateRefusal as error:
            _refuse(f"rejects an environment's replies {', '.join(order)} ({error.message})", "takes them")
    _compare(bridge, first, turns, replies, whole)


def _compare(
    bridge: Bridge, first: Sequence[Message], turns: Sequence[Message], replies: Sequence[Sequence[Message]], whole: str
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
    if _QUESTION["content"] in expected:
        what = "changes the first prompt when messages follow, such as its tools or system message"
        _refuse(f"{what}: {where}", "keeps it", contradicts=True)
    _refuse(f"changes earlier turns when messages follow: {where}", "keeps them", contradicts=True)


def _refuse(fault: str, remedy: str, *, contradicts: bool = False) -> NoReturn:
    why = ", so a later turn would contradict the tokens that were sampled" if contradicts else ""
    raise InvalidInput(
        f"the chat template {fault}{why}: set data.chat_template to one that {remedy}", field="data.chat_template"
    )
