"""Plays single-player games of textarena, in a worker process."""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version as version_of
from typing import Any

import numpy as np
import textarena as ta

_PLAYER = 0
_LOCK = threading.Lock()


class Game:
    """Shows only what is new in each turn. The reward of the game comes with its end; turns before have none.

    Games draw from the global generators of `random` and numpy. Each game has its own states of them, which are set for
    each call, so that a seed gives the same game whatever else the worker plays.
    """

    version = f"textarena-{version_of('textarena')}"
    roles = ("user",)

    @classmethod
    def prepare(cls, game: str, kwargs: Mapping[str, Any]) -> None:
        """Checks that the game can be played.

        Raises:
            ValueError: It is not a game for one player. Making it may raise anything.
        """
        Game(game, kwargs).reset(seed=0, row={})

    def __init__(self, game: str, kwargs: Mapping[str, Any]):
        self._game = self._inner = ta.make(game, **kwargs)
        while isinstance(self._inner, ta.Wrapper):  # wrappers show the whole history again in each turn
            self._inner = self._inner.env

    def reset(self, seed: int, row: Mapping[str, object]) -> str:
        """Returns the rules and the first position."""
        seed %= 2**32  # numpy takes no larger one
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self._own_generators():
            self._game.reset(num_players=1, seed=seed)
            if not isinstance(self._inner.state, ta.SinglePlayerState):
                raise ValueError(f"{self._inner.env_id} is not a game for one player")
            return self._news()

    def step(self, text: str) -> tuple[str, float, bool]:
        """Makes a move."""
        with self._own_generators():
            done, _ = self._game.step(action=text)
            return self._news(), self._reward() if done else 0.0, done

    def _reward(self) -> float:
        rewards, _ = self._game.close()
        return float(rewards[_PLAYER])

    def _news(self) -> str:
        """Returns the game's messages since the last call, without the player's own moves."""
        _, observations = self._inner.get_observation()
        return "\n".join(text for sender, text, _ in observations if sender != _PLAYER)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        with _LOCK:
            outer = random.getstate(), np.random.get_state()
            _set_generators(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set_generators(outer)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
