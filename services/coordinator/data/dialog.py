"""Turns what an environment says into tokens, and what the policy says into text."""

from collections.abc import Sequence

from lockstep.reward.v1.environment_pb2 import Message

from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.data.bridge import Bridge
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.tokenizer import Tokenizer


class Dialog:
    """Applies the limits of the config to what an environment says, and bridges it onto the stream of tokens."""

    def __init__(self, tokenizer: Tokenizer, bridge: Bridge, config: Config):
        assert config.environment, "the run has an environment"
        self._tokenizer, self._bridge = tokenizer, bridge
        self._max_message_tokens = config.environment.max_message_tokens
        self._max_prompt_tokens, self._stop = config.data.max_prompt_tokens, config.rollout.sampling.stop

    def begin(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """Returns the first prompt: the row's, with the tools and the environment's first messages.

        Raises:
            InvalidInput: It is longer than data.max_prompt_tokens.
        """
        first = prompt
        if messages or self._has_tools:
            conversation = [*prompt.messages, *map(self._cut, messages)]
            text, tokens = self._bridge.render_prompt(conversation)
            first = replace(prompt, text=text, tokens=tuple(tokens))
        if len(first.tokens) > self._max_prompt_tokens:
            raise InvalidInput(
                f"prompt {prompt.prompt_id}: with the tools and the environment's first messages it has "
                f"{len(first.tokens)} tokens, above data.max_prompt_tokens {self._max_prompt_tokens}",
                field="data.max_prompt_tokens",
            )
        return first

    def reply(self, turn: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        """Returns the tokens that follow the policy's `turn`: the rest of its end, the messages, the next header."""
        return self._bridge.extend(turn, list(map(self._cut, messages))) if messages else ()

    def text(self, turn: Sequence[int]) -> str:
        """Returns the text of a turn, without special tokens."""
        return self._tokenizer.decode(turn)

    def is_stopped(self, turn: Sequence[int]) -> bool:
        """Returns whether a turn ended with a stop token or a stop string."""
        text = self.text(turn)
        return turn[-1] in self._tokenizer.eos_token_ids or any(stop in text for stop in self._stop)

    def _cut(self, message: Message) -> dict[str, str]:
        most, content = self._max_message_tokens, message.content
        if most and len(tokens := self._tokenizer.encode(content)) > most:
            content = self._tokenizer.decode(tokens[:most], skip_special_tokens=False)
        return {"role": message.role, "content": content} | ({"name": message.name} if message.name else {})
