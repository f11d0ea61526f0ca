"""Makes the messages of made-up conversations, from which the chat template's text between turns is taken."""

from collections.abc import Sequence

from services.coordinator.text.chat_template import Message

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
