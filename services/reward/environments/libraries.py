"""Games of textarena and tasks of reasoning-gym, which a worker process plays as it plays a class of a user.

Each imports its package when it is prepared, because a service may have only one of them.
"""

import json
import logging
import math
import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version as version_of
from typing import Any

import numpy as np

from services.common.json_values import JsonMapping
from services.common.reasoning_tasks import COLUMN, INSTRUCTION, TAG, make_tasks
from services.reward.errors import EnvironmentFailure, EpisodeError

log = logging.getLogger(__name__)
_PLAYER = 0
_NO_NUMBER = re.compile(r"\b(?:nan|inf(?:inity)?)j?\b", re.IGNORECASE)
_LOCK = threading.Lock()


class Game:
    """Shows only what is new in each turn. The reward of the game comes with its end; turns before have none.

    Games draw from the global generators of `random` and numpy. Each game has its own states of them, which are set for
    each call, so that a seed gives the same game whatever else the worker plays.
    """

    version = ""
    roles = ("user",)

    @classmethod
    def prepare(cls, game: str, kwargs: Mapping[str, object]) -> None:
        """Raises ValueError if it is not a game for one player. Making it may raise anything."""
        cls(game, kwargs).reset(seed=0, row={})
        cls.version = f"textarena-{version_of('textarena')}"

    def __init__(self, game: str, kwargs: Mapping[str, object]):
        import textarena as ta

        self._ta = ta
        self._game = self._inner = ta.make(game, **kwargs)
        while isinstance(self._inner, ta.Wrapper):  # wrappers show the whole history again in each turn
            self._inner = self._inner.env

    def reset(self, seed: int, row: Mapping[str, object]) -> str:
        seed %= 2**32  # numpy takes no larger one
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self._own_generators():
            self._game.reset(num_players=1, seed=seed)
            if not isinstance(self._inner.state, self._ta.SinglePlayerState):
                raise ValueError(f"{self._inner.env_id} is not a game for one player")
            return self._new_messages()

    def step(self, text: str) -> tuple[str, float, bool]:
        """Plays the move. One that the game's own code cannot read ends the game, with the lowest reward of a game."""
        with self._own_generators():
            try:
                done, _ = self._game.step(action=text)
            except MemoryError:  # of the worker
                raise
            except Exception as error:  # noqa: BLE001 of a library, which a move can make raise anything
                log.warning("textarena: %r made the game fail: %r", text[-100:], error)
                return "", -1.0, True
            news = self._new_messages()
            return news, float(self._game.close()[0][_PLAYER]) if done else 0.0, done

    def _new_messages(self) -> str:
        """Returns the game's messages since the last call, without the player's own moves."""
        _, observations = self._inner.get_observation()
        return "\n".join(text for sender, text, _ in observations if sender != _PLAYER)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        with _LOCK:
            outer = _generators()
            _set_generators(self._states)
            try:
                yield
            finally:
                self._states = _generators()
                _set_generators(outer)


def _generators() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class Task:
    """Scores one answer: the text after the last <answer>, up to </answer>, or all of it if there is none."""

    version = ""
    roles = ("user",)

    @classmethod
    def prepare(cls, task: str, kwargs: Mapping[str, object]) -> None:
        """Raises InvalidInput if the task cannot be made."""
        make_tasks(task, seed=0, size=1, settings=kwargs)
        from services.reward.compat import refuse_eval_of_reasoning_gym

        refuse_eval_of_reasoning_gym()
        cls.version = f"reasoning-gym-{version_of('reasoning-gym')}"

    def __init__(self, task: str, kwargs: Mapping[str, object]):
        self._task, self._kwargs = task, kwargs

    def reset(self, seed: int, row: JsonMapping) -> str | None:
        """Takes the row's task. Without one, the seed makes a task, whose question is returned."""
        if COLUMN not in row:
            self._tasks = make_tasks(self._task, seed=seed % 2**31, size=1, settings=self._kwargs)
            self._entry = self._tasks[0]
            return f"{self._entry['question']}\n\n{INSTRUCTION}"
        made = json.loads(row[COLUMN])
        if made["task"] != self._task:
            raise EpisodeError(EnvironmentFailure.REFUSED, f"the row is of task {made['task']}, not {self._task}")
        self._tasks = make_tasks(self._task, seed=0, size=1, settings=made["settings"])
        self._entry = made["entry"]
        return None

    def step(self, text: str) -> tuple[None, float, bool]:
        """Scores the answer, which ends the episode. One that the task's own code cannot read is wrong."""
        answer = text.rpartition(f"<{TAG}>")[2].partition(f"</{TAG}>")[0].strip()
        if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(str(self._entry["answer"])):
            return None, 0.0, True  # some tasks compare it with the solution, and find no difference
        try:
            score = float(self._tasks.score_answer(answer, self._entry))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 of a library, which an answer can make raise anything
            log.warning("reasoning-gym: %s cannot score %r: %r", self._task, answer[-100:], error)
            score = 0.0
        return None, score if math.isfinite(score) else 0.0, True
