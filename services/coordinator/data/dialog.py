"""Converts an environment's messages to tokens, and the policy's turns to text or to an agent's messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby

from lockstep.reward.v1.environment_pb2 import Message

from services.common.config.environment import AgentEnvironmentConfig, BaseEnvironmentConfig, ReasoningTags, ToolSyntax
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.common.json_values import JsonMapping, JsonObject
from services.common.tool_syntax import (
    CALL_TAGS,
    OTHER_REASONING_TAGS,
    THINK,
    BadCall,
    ToolCall,
    find_calls,
    read_texts,
)
from services.coordinator.data.prompts import Prompt
from services.coordinator.text.bridge import Bridge
from services.coordinator.text.threads import Call
from services.coordinator.text.tokenizer import Tokenizer

_MAX_TAIL_TOKENS = 100
"""Number of tokens that is more than a tag and the white space after it have."""


class OverlongPrompt(InvalidInput):
    """A first prompt is longer than data.max_prompt_tokens."""


def decode_completions(completions: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of completions, without special tokens but with the tags of reasoning."""
    if not (tags := _special_tags(tokenizer, chain(THINK, *OTHER_REASONING_TAGS))):
        return tokenizer.decode_batch(completions)
    return [_decode(tokens, tokenizer, tags) for tokens in completions]


def _special_tags(tokenizer: Tokenizer, tags: Iterable[str]) -> Mapping[int, str]:
    """Returns those of `tags` that are special tokens, which decoding leaves out, by their tokens."""
    encoded = {tag: tokenizer.encode(tag) for tag in tags if tokenizer.has_token(tag)}
    return {ids[0]: tag for tag, ids in encoded.items() if len(ids) == 1 and not tokenizer.decode(ids)}


def _decode(tokens: Sequence[int], tokenizer: Tokenizer, tags: Mapping[int, str]) -> str:
    parts = [(tag, list(part)) for tag, part in groupby(tokens, tags.get)]
    return "".join(tag * len(part) if tag else tokenizer.decode(part) for tag, part in parts)


class Dialog:
    """Applies the config's limits to an environment's messages, and appends them to the stream of tokens."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, object]], config: Config):
        assert config.environment, "the run has an environment"
        self._tokenizer = tokenizer
        self._bridge = Bridge(tokenizer, tools, config.data.chat_template_kwargs)
        environment = config.environment
        self._reasoning_tags = environment.reasoning_tags if isinstance(environment, ReasoningTags) else ()
        syntax = environment.syntax if isinstance(environment, ToolSyntax) else "none"
        syntax = environment.tool_syntax if isinstance(environment, AgentEnvironmentConfig) else syntax
        self._result_tag = environment.result_tag if isinstance(environment, ToolSyntax) else ""
        self._call_tags = CALL_TAGS if syntax in ("hermes", "qwen3_coder") else ()
        self._has_default_tags = "reasoning_tags" not in environment.model_fields_set
        takes_turns = isinstance(environment, BaseEnvironmentConfig)
        self._max_message_tokens = environment.max_message_tokens if takes_turns else None
        self._max_prompt_tokens, self._stop = config.data.max_prompt_tokens, config.rollout.sampling.stop

    def check(self, roles: Sequence[str]) -> None:
        """Proves that the chat template keeps earlier turns when messages of `roles` follow, and that the model reasons
        between the tags of the config.

        Raises:
            InvalidInput: It changes them, or cannot render the messages; or the tags are not set and the model has
                tokens for others; or results are to be within the policy's turn, and nothing interrupts it.
        """
        self._bridge.check(roles)
        if self._result_tag and not self._stop:
            raise InvalidInput(
                f"environment.result_tag {self._result_tag} puts results within the policy's turn, but nothing stops "
                'that at a call: set rollout.sampling.stop to the end of a call, such as ["</search>"]',
                field="rollout.sampling.stop",
            )
        if not self._reasoning_tags or not self._has_default_tags:
            return
        has_token = self._tokenizer.has_token
        for tags in () if has_token(self._reasoning_tags[0]) else OTHER_REASONING_TAGS:
            if all(map(has_token, tags)):
                shown = json.dumps(tags, ensure_ascii=False)
                raise InvalidInput(
                    f"the model has tokens for reasoning between {tags[0]} and {tags[1]}: set "
                    f"environment.reasoning_tags to {shown}, or tools that it only thinks of would be called",
                    field="environment.reasoning_tags",
                )

    def begin(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """Returns the first prompt: the row's, which shows the tools already, with the environment's first messages.

        Raises:
            OverlongPrompt: It is longer than data.max_prompt_tokens.
        """
        sent = list(map(self._cut, messages))
        if any(message["role"] for message in sent):
            tokens = self._bridge.prompt(prompt.messages, sent)
        else:
            tokens = [*prompt.tokens, *(self._bridge.extend(prompt.tokens, sent) if sent else ())]
        if len(tokens) > self._max_prompt_tokens:
            raise OverlongPrompt(
                f"prompt {prompt.prompt_id}: with the environment's first messages it has "
                f"{len(tokens)} tokens, above data.max_prompt_tokens {self._max_prompt_tokens}: increase it, or set "
                "data.overlong=drop",
                field="data.max_prompt_tokens",
            )
        return prompt.read_as(tokens, self._tokenizer)

    def reply(self, turn: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        """Returns the tokens that follow the policy's `turn`: the rest of its end, the messages, the next header."""
        return self._bridge.extend(turn, list(map(self._cut, messages))) if messages else ()

    def check_played(
        self, prompt: Prompt, messages: Sequence[Message], taken: Sequence[tuple[Sequence[int], Sequence[Message]]]
    ) -> None:
        """Compares an episode with what the chat template makes of the whole conversation; see Bridge.check_episode.

        `prompt` is the row's, `messages` are the environment's first ones, and `taken` the policy's tokens of each turn
        but the last, with the environment's reply.

        Raises:
            InvalidInput: They differ.
        """
        turns, replies = [turn for turn, _ in taken], [list(map(self._cut, reply)) for _, reply in taken]
        self._bridge.check_episode(prompt.messages, list(map(self._cut, messages)), turns, replies)

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt ends with the begin of reasoning, so that the turn after it begins within it."""
        if not self._reasoning_tags:
            return False
        begin = self._reasoning_tags[0]
        tail = self._tokenizer.decode(list(prompt[-_MAX_TAIL_TOKENS:]), skip_special_tokens=False)
        return tail.rstrip().endswith(begin)

    def text(self, turn: Sequence[int]) -> str:
        """Returns the text of a turn, without special tokens but with the tags of reasoning and of tool calls."""
        return _decode(turn, self._tokenizer, self._special_tags)

    def has_ended(self, turn: Sequence[int]) -> bool:
        """Returns whether a turn ended with a stop token."""
        return turn[-1] in self._tokenizer.eos_token_ids

    def is_stopped(self, turn: Sequence[int]) -> bool:
        """Returns whether a turn ended with a stop token or a stop string."""
        text = self.text(turn)
        return self.has_ended(turn) or any(stop in text for stop in self._stop)

    @cached_property
    def _special_tags(self) -> Mapping[int, str]:
        """Returns the tags of reasoning and of tool calls that are special tokens, which decoding leaves out."""
        return _special_tags(self._tokenizer, [*self._reasoning_tags, *self._call_tags])

    def _cut(self, message: Message) -> dict[str, str]:
        most, content = self._max_message_tokens, message.content
        if most and len(tokens := self._encode(content)) > most:
            begin = content.rfind(f"</{self._result_tag}>") if self._result_tag else -1
            end = content[begin:] if begin >= 0 else ""  # the tag around results stays whole
            tokens = self._encode(content.removesuffix(end))[: max(0, most - len(self._encode(end)))]
            # Without what the cut has left of a character, the last token may become several.
            while len(self._encode(content := self._decode(tokens).rstrip("\ufffd") + end)) > most and tokens:
                tokens = tokens[:-1]
        return {"role": message.role, "content": content} | ({"name": message.name} if message.name else {})

    def _encode(self, content: str) -> list[int]:
        return self._tokenizer.encode_marked(self._tokenizer.as_text(content))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def message_of(
    settings: AgentEnvironmentConfig, dialog: Dialog, call: Call, answer: Sequence[int], said: JsonMapping
) -> tuple[JsonMapping, str]:
    """Returns the message of an answer for the agent, and which text of the request's `stop` has ended it.

    A text with a call of tools that is malformed is the content as it is.
    """
    text, is_reasoning = dialog.text(answer), dialog.opens_reasoning(call.prompt)
    reasoning, content = _split_reasoning(text, settings.reasoning_tags, is_reasoning=is_reasoning)
    shown, stop = _split_at_stop(content, said["stop"])
    message: JsonObject = {"role": "assistant", "content": shown}
    message |= {"reasoning": reasoning} if reasoning else {}
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in said["tools"]}
    if not tools or settings.tool_syntax == "none":
        return message, stop
    calls = find_calls(settings.tool_syntax, text, {}, settings.reasoning_tags, is_reasoning=is_reasoning)
    made = [_typed(one, tools, settings.tool_syntax) for one in calls if isinstance(one, ToolCall)]
    if not made or any(isinstance(one, BadCall) for one in calls):
        return message, stop
    message["content"] = "" if settings.tool_syntax == "llama3" else content.partition(CALL_TAGS[0])[0].strip()
    # 9 letters and digits, which Mistral's templates want.
    ids = [f"c{call.number % 10**5:05d}{index:03d}" for index in range(len(made))]
    pairs = zip(ids, made, strict=True)
    message["tool_calls"] = [
        {"id": name, "name": one.name, "arguments": _written(one.arguments)} for name, one in pairs
    ]
    return message, ""


def _typed(call: ToolCall, tools: JsonMapping, syntax: str) -> ToolCall:
    """Returns the call with arguments of the types of its tool; this syntax writes all as text."""
    if syntax != "qwen3_coder" or call.name not in tools:
        return call
    return ToolCall(call.name, read_texts(call.arguments, tools[call.name]))


def _written(arguments: Mapping[str, object]) -> str:
    """Returns arguments as JSON text. Halves of surrogate pairs, which clients cannot send back, are replaced."""
    return json.dumps(arguments, ensure_ascii=False).encode(errors="replace").decode()


def _split_reasoning(text: str, tags: Sequence[str], *, is_reasoning: bool) -> tuple[str, str]:
    """Returns the reasoning at the begin of a text, and the rest."""
    if not tags:
        return "", text
    begin, end = tags
    opened = text.lstrip().startswith(begin)
    if not (is_reasoning or opened or end in text):
        return "", text
    reasoning, _, content = text.partition(end)
    return (reasoning.lstrip().removeprefix(begin) if opened else reasoning).strip(), content.strip()


def _split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Returns the text before the first of the stop strings that the agent has asked for, and that string."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), ""))
    return text[:at], stop
