"""Reads the results of a user's environment, in the worker process. Imports nothing heavy."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.environments.base import EnvironmentFailure, EpisodeError

_STEP = "(observation, reward, done), or a dict with messages, reward and done"


def read_messages(observation: object) -> list[dict[str, str]]:
    """Returns messages with role and content: none for None, one of the user for a text, or the list as it is.

    Raises:
        EpisodeError: INVALID_REPLY if it is something else.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence):
        raise _invalid(f"an observation must be None, text or a list of messages, not {observation!r:.200}")
    return [_message(message) for message in observation]


def read_step(result: object) -> dict[str, Any]:
    """Returns messages, reward and done.

    Raises:
        EpisodeError: INVALID_REPLY if it is not what a step returns, or the reward is not finite.
    """
    if isinstance(result, Mapping):
        if not {"reward", "done"} <= set(result) <= {"messages", "observation", "reward", "done"}:
            raise _invalid(f"step returned a dict with {', '.join(map(str, result))}: return {_STEP}")
        observation, reward, done = result.get("messages", result.get("observation")), result["reward"], result["done"]
    elif isinstance(result, tuple) and len(result) == 3:
        observation, reward, done = result
    else:
        raise _invalid(f"step returned {result!r:.200}: return {_STEP}")
    return {"messages": read_messages(observation), "reward": _reward(reward), "done": _done(done)}


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message) <= {"role", "content", "name"}:
        raise _invalid(f"a message must have role and content, and perhaps name, not {message!r:.200}")
    if not all(isinstance(value, str) for value in message.values()):
        raise _invalid(f"a message's values must be text, not {message!r:.200}")
    return dict(message)


def _reward(reward: object) -> float:
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise _invalid(f"a reward must be a finite number, not {reward!r:.200}")
    return float(reward)


def _done(done: object) -> bool:
    # numpy's bool is no bool, and has no class in common with it.
    if not isinstance(done, bool) and type(done).__name__ not in ("bool", "bool_"):
        raise _invalid(f"done must be True or False, not {done!r:.200}")
    return bool(done)


def _invalid(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.INVALID_REPLY, detail)
