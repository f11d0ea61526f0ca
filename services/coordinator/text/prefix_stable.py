"""Checks that a chat template does not change earlier text when messages are added to a conversation."""

from collections.abc import Sequence
from typing import Protocol

from services.common.errors import InvalidInput
from services.coordinator.text.chat_template import Message

_NUM_SHOWN = 30  # characters before and after the first difference
_FIX_PROMPT = (
    "Set data.chat_template_kwargs (enable_thinking) to match the messages, or data.chat_template to one that does"
)
_FIX_TURN = (
    "Set data.chat_template to one that keeps earlier turns and their thinking, or give one answer per conversation"
)


class Renders(Protocol):
    """Describes a ChatTemplate or a Tokenizer."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """Renders `messages`; see ChatTemplate.render."""
        ...


def check_prefix_stable(template: Renders, messages: Sequence[Message], **variables: object) -> None:
    """Rejects a template whose training text differs from what the model sees when it answers.

    For each assistant message k, the rendering of messages[:k] with the header of the assistant's turn must be a prefix
    of the rendering of messages[:k + 1], which must be a prefix of the whole conversation's. Then the whole text has
    every turn exactly as it was rendered when it was the last: the loss mask covers a turn without its header, and
    sampled tokens stay valid while messages are added. Templates that strip earlier turns' thinking fail this check.

    Prompts for one answer need no check. To train on several turns of one text, call this for each conversation.

    Args:
        template: The template to check.
        messages: A conversation with the assistant's turns. A single turn at the end can only fail by its header.
        variables: Further variables of the template, such as enable_thinking.

    Raises:
        InvalidInput: A rendering is not a prefix. The error names the message and the first characters that differ.
        TemplateRefusal: The template rejects a beginning of these messages.
    """
    whole = template.render(messages, add_generation_prompt=False, **variables)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = template.render(messages[: index + 1], add_generation_prompt=False, **variables)
        if index > 0:
            prompt = template.render(messages[:index], add_generation_prompt=True, **variables)
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
