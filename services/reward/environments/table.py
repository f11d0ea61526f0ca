"""Keeps the open episodes of a run's environment, each for a limited time."""

import asyncio
import itertools

from lockstep.reward.v1 import environment_pb2 as pb

from services.common.errors import PreconditionFailed, Reason
from services.reward.environments.base import Turn
from services.reward.environments.episode import Episode, EpisodeContext
from services.reward.errors import EnvironmentFailure


class EpisodeTable:
    """Holds the episodes by id. A timer ends each of them `episode_s` seconds after its reset."""

    def __init__(self, context: EpisodeContext, episode_s: float):
        self._context, self._episode_s = context, episode_s
        self._episodes: dict[str, Episode] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()
        # An id can be played again after its end, which the environment may still be busy with.
        self._numbers = itertools.count()

    async def reset(self, request: pb.ResetRequest, row: dict[str, object]) -> pb.ResetResponse:
        """Begins an episode. If it already has steps, its caller was restarted, and the episode begins again."""
        episode = self._episodes.get(request.episode_id)
        if episode and episode.has_stepped:
            self._drop(request.episode_id, EnvironmentFailure.CRASHED, "the episode began anew")
            episode = None
        return await (episode or self._add(request.episode_id)).reset(request, row)

    async def step(self, request: pb.StepRequest, turn: Turn) -> pb.StepResponse:
        """Plays one turn.

        Raises:
            PreconditionFailed: EPISODE_NOT_OPEN if there is no such episode: play it again from its reset.
        """
        episode = self._episodes.get(request.episode_id)
        if episode is None:
            message = (
                f"episode {request.episode_id} is not open: it was closed, its time limit of {self._episode_s:g} s "
                "(environment.episode_s) is over, or the service was restarted"
            )
            raise PreconditionFailed(message, reason=Reason.EPISODE_NOT_OPEN, episode_id=request.episode_id)
        return await episode.step(request, turn)

    async def end(self, episode_id: str) -> None:
        """Ends and forgets an episode; does nothing if there is none."""
        if ending := self._drop(episode_id, EnvironmentFailure.CRASHED, "the episode was closed"):
            await asyncio.shield(ending)

    def end_all(self, why: str) -> None:
        """Begins to end all episodes, and forgets them."""
        for episode_id in list(self._episodes):
            self._drop(episode_id, EnvironmentFailure.CRASHED, why)

    async def close(self) -> None:
        """Ends all episodes and then the environment."""
        self.end_all("the run was closed")
        await asyncio.gather(*self._ending)
        await self._context.environment.close()

    def _add(self, episode_id: str) -> Episode:
        episode = Episode(f"{episode_id}/{next(self._numbers)}", self._context)
        self._episodes[episode_id] = episode
        detail = f"the episode took longer than {self._episode_s:g} s (environment.episode_s)"
        lease = (episode_id, EnvironmentFailure.TIMEOUT, detail)
        self._leases[episode_id] = asyncio.get_running_loop().call_later(self._episode_s, self._drop, *lease)
        return episode

    def _drop(self, episode_id: str, reason: EnvironmentFailure, detail: str) -> asyncio.Task[None] | None:
        if episode_id not in self._episodes:
            return None
        self._leases.pop(episode_id).cancel()
        ending = asyncio.create_task(self._episodes.pop(episode_id).end(reason, detail))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending
