"""Converts an environment's messages to tokens, and the policy's turns to text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.reward.v1.environment_pb2 import Message

from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.data.prompts import Prompt
from services.coordinator.text.bridge import Bridge
from services.coordinator.text.tokenizer import Tokenizer


class OverlongPrompt(InvalidInput):
    """A first prompt is longer than data.max_prompt_tokens."""


class Dialog:
    """Applies the config's limits to an environment's messages, and appends them to the stream of tokens."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, object]], config: Config):
        assert config.environment, "the run has an environment"
        self._tokenizer = tokenizer
        self._bridge = Bridge(tokenizer, tools, config.data.chat_template_kwargs)
        self._max_message_tokens = config.environment.max_message_tokens
        self._max_prompt_tokens, self._stop = config.data.max_prompt_tokens, config.rollout.sampling.stop

    def check(self, roles: Sequence[str]) -> None:
        """Proves that the chat template keeps earlier turns when messages of `roles` follow.

        Raises:
            InvalidInput: It changes them, or cannot render the messages.
        """
        self._bridge.check(roles)

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
        return replace(prompt, tokens=tuple(tokens))

    def reply(self, turn: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        """Returns the tokens that follow the policy's `turn`: the rest of its end, the messages, the next header."""
        return self._bridge.extend(turn, list(map(self._cut, messages))) if messages else ()

    def check_played(
        self, prompt: Prompt, messages: Sequence[Message], taken: Sequence[tuple[Sequence[int], Sequence[Message]]]
    ) -> None:
        """Compares an episode with what the chat template makes of the whole conversation; see Bridge.check_episode.

        Args:
            prompt: The row's prompt.
            messages: The environment's first messages.
            taken: The policy's tokens of each turn but the last, with the environment's reply.

        Raises:
            InvalidInput: They differ.
        """
        turns, replies = [turn for turn, _ in taken], [list(map(self._cut, reply)) for _, reply in taken]
        self._bridge.check_episode(prompt.messages, list(map(self._cut, messages)), turns, replies)

    def text(self, turn: Sequence[int]) -> str:
        """Returns the text of a turn, without special tokens."""
        return self._tokenizer.decode(turn)

    def is_stopped(self, turn: Sequence[int]) -> bool:
        """Returns whether a turn ended with a stop token or a stop string."""
        text = self.text(turn)
        return turn[-1] in self._tokenizer.eos_token_ids or any(stop in text for stop in self._stop)

    def _cut(self, message: Message) -> dict[str, str]:
        most, content = self._max_message_tokens, message.content
        if most and len(tokens := self._tokenizer.encode_marked(self._tokenizer.as_text(content))) > most:
            content = self._tokenizer.decode(tokens[:most], skip_special_tokens=False)
        return {"role": message.role, "content": content} | ({"name": message.name} if message.name else {})
