"""Checks an environment's replies and converts them to protobuf messages."""

import json
import math
from collections.abc import Sequence

from lockstep.reward.v1 import environment_pb2 as pb

from services.reward.environments.base import Message, Reply, ToolCall
from services.reward.errors import EnvironmentFailure, EpisodeError


def reset_response(messages: Sequence[Message], roles: Sequence[str]) -> pb.ResetResponse:
    """Returns the answer to a reset.

    Raises:
        EpisodeError: INVALID_REPLY if these are not messages of `roles`, or raw text.
    """
    return pb.ResetResponse(messages=_messages(messages, roles))


def step_response(reply: Reply, roles: Sequence[str]) -> pb.StepResponse:
    """Returns the answer to a step.

    Raises:
        EpisodeError: INVALID_REPLY if the reply is malformed or its reward is not finite.
    """
    if type(reply.done) is not bool:
        raise _invalid(f"done must be true or false, not {reply.done!r}")
    if type(reply.reward) not in (float, int) or not math.isfinite(reply.reward):
        raise _invalid(f"a reward must be a finite number, not {reply.reward!r}")
    return pb.StepResponse(
        messages=_messages(reply.messages, roles),
        reward=reply.reward,
        done=reply.done,
        tool_calls=[_tool_call(call) for call in reply.tool_calls],
        num_calls=len(reply.outcomes),
        num_failed_calls=sum(outcome != "ok" for outcome in reply.outcomes),
    )


def failure(error: EpisodeError) -> pb.EnvironmentFailure:
    """Returns a failure as it is sent."""
    detail = error.detail.encode(errors="replace").decode()
    return pb.EnvironmentFailure(reason=f"ENVIRONMENT_FAILURE_REASON_{error.reason}", message=detail, alone=error.alone)


def _messages(messages: Sequence[Message], roles: Sequence[str]) -> list[pb.Message]:
    for message in messages:
        if message.role and message.role not in roles:
            raise _invalid(f"a message's role must be one of {', '.join(roles)}, not {message.role!r}")
    try:
        return [pb.Message(role=m.role, content=m.content, name=m.name) for m in messages]
    except (TypeError, ValueError) as error:  # not text, or half of a surrogate pair
        raise _invalid(f"a message is not text: {error}") from error


def _tool_call(call: ToolCall) -> pb.ToolCall:
    try:
        return pb.ToolCall(name=call.name, arguments_json=json.dumps(call.arguments))
    except (TypeError, ValueError) as error:
        raise _invalid(f"a tool call is not JSON: {error}") from error


def _invalid(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.INVALID_REPLY, detail)
