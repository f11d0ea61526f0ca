"""Converts conversations to protobuf messages and back."""

from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.coordinator.data.conversation import Conversation, Part


def to_message(conversation: Conversation) -> pb.Conversation:
    """Returns the message of a conversation."""
    return pb.Conversation(
        prompt_id=conversation.prompt_id,
        sample=conversation.sample,
        prompt=conversation.prompt,
        parts=[pb.ConversationPart(text=part.text, reward=part.reward) for part in conversation.parts],
        reward=conversation.reward,
        finish_reason=conversation.finish_reason,
    )


def from_message(message: pb.Conversation) -> Conversation:
    """Returns the conversation of a message."""
    parts = [Part(part.text, part.reward if part.HasField("reward") else None) for part in message.parts]
    return Conversation(message.prompt_id, message.sample, message.prompt, parts, message.reward, message.finish_reason)
