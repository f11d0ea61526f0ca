"""Whether a chat template leaves what it wrote as it was when the conversation goes on."""

from collections.abc import Sequence
from typing import Protocol

from services.common.errors import InvalidInput
from services.coordinator.data.chat_template import Message

_NUM_SHOWN = 30  # characters before and after the first difference
_FIX_PROMPT = (
    "Set data.chat_template_kwargs (enable_thinking) as the messages are, or data.chat_template to one that fits"
)
_FIX_TURN = (
    "Set data.chat_template to one that keeps earlier turns, thinking included, or give one answer per conversation"
)


class Renders(Protocol):
    """A ChatTemplate or a Tokenizer."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """Text of `messages`; ChatTemplate.render."""
        ...


def check_prefix_stable(template: Renders, messages: Sequence[Message], **variables: object) -> None:
    """Refuses a template under which a model would not be trained on what it sees when it answers.

    For each assistant message k, the rendering of messages[:k] with the header of the assistant's turn must be a prefix
    of that of messages[:k + 1], and that one a prefix of the whole conversation's. Then the whole text holds every turn
    as it was written when it was the last: a turn's loss mask is what its header leaves, and sampled tokens can be kept
    while messages are added. Templates that strip the thinking of earlier turns do not have the property.

    Prompts for one answer need no check. Whoever trains on several turns of one text calls this for each conversation.

    Args:
        template: Renders.
        messages: A conversation with the assistant's turns; one turn that nothing follows can fail only by its header.
        variables: Further variables of the template, such as enable_thinking.

    Raises:
        InvalidInput: It is not so. Names the message, and the first characters that differ.
        TemplateRefusal: The template does not take the beginning of these messages.
    """
    whole = template.render(messages, add_generation_prompt=False, **variables)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = template.render(messages[: index + 1], add_generation_prompt=False, **variables)
        if index > 0:
            prompt = template.render(messages[:index], add_generation_prompt=True, **variables)
            _require_prefix(prompt, turn, f"the prompt for message {index} is not how that message begins", _FIX_PROMPT)
        _require_prefix(turn, whole, f"message {index} is written otherwise once messages follow", _FIX_TURN)


def _require_prefix(text: str, longer: str, problem: str, fix: str) -> None:
    if longer.startswith(text):
        return
    differs = (index for index, (a, b) in enumerate(zip(text, longer, strict=False)) if a != b)
    same = next(differs, min(len(text), len(longer)))
    before = text[max(0, same - _NUM_SHOWN) : same]
    first, then = text[same : same + _NUM_SHOWN], longer[same : same + _NUM_SHOWN]
    raise InvalidInput(
        f"the chat template is not prefix-stable: {problem}: after {before!r} comes first {first!r}, then {then!r}. "
        f"{fix}",
        field="data.chat_template",
    )
