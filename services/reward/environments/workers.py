"""Plays episodes in worker processes, by default with a class: the user's, or one of libraries.py.

Each process plays many, so that one that fails hurts others as little as can be:

- A call that does not end when it is canceled is stuck, mostly in a thread. Its worker gets no more episodes, and ends
  once its others have ended; another takes its place.
- If a worker dies, or stalls so that it has to be killed, the call that began last is the likeliest cause. The other
  episodes fail as NEIGHBOR; so do all of them if none had a call in progress.
- An episode can be isolated: it gets a process of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from services.common.config.environment import (
    AgentEnvironmentConfig,
    PythonEnvironmentConfig,
    ReasoningGymEnvironmentConfig,
    TextArenaEnvironmentConfig,
    WorkerEnvironmentConfig,
)
from services.common.tasks import keep
from services.reward.environments.base import Environment, Message, Reply, Turn, off_the_clock
from services.reward.environments.executor import MAX_REPLY_BYTES
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes import child
from services.reward.processes.pool import Calls, Target, Worker, WorkerPool

log = logging.getLogger(__name__)

Config = WorkerEnvironmentConfig | AgentEnvironmentConfig
_OF_CLASSES = "services.reward.environments.executor:ClassExecutor"
_LIBRARIES = "services.reward.environments.libraries"


class EpisodeWorker(Worker):
    """One process, started once. Its episodes are lost if it dies."""

    def __init__(self, target: Target, version: str, on_loss: Callable[["EpisodeWorker"], None] | None):
        super().__init__(target, version)
        # Called when it must get no further episodes, because it died or a call is stuck. None if it plays only one.
        self._on_loss = on_loss
        self._is_fault = True
        self.episodes: set[str] = set()  # those that have begun here and not ended
        self.faults: dict[str, EpisodeError] = {}  # why episodes cannot go on here

    async def start(self) -> None:
        try:
            await super().start()
        except EpisodeError as error:  # a late start is no fault of the episode's
            raise _crashed(error.detail) from error.__cause__

    async def play(self, episode: str, message: Mapping[str, object]) -> child.Reply:
        """Sends a call of an episode and returns the reply. Raises the episode's fault if the worker died."""
        if episode in self.faults:
            raise self.faults[episode]
        return await self.call({"episode": episode, **message})

    async def kill(self, why: str = "the run was closed") -> None:
        if not self._why_killed:
            self._is_fault = False
        await super().kill(why)

    async def _give_up(self, call: Mapping[str, object]) -> None:
        episode = str(call["episode"])
        log.warning("worker %d gets no more episodes: a call of %s does not end", self.pid, episode)
        detail = "an earlier call of the episode does not end"
        self.faults[episode] = EpisodeError(EnvironmentFailure.TIMEOUT, detail, alone=self._on_loss is not None)
        if self._on_loss:
            self._on_loss(self)

    def _lose(self, calls: Calls, why: str) -> None:
        episodes = {number: str(call["episode"]) for number, (call, _) in calls.items()}
        begun = [episode for number, episode in episodes.items() if number <= self._last_begun]
        self._assign_faults(begun, set(episodes.values()), why)
        for number, (_, reply) in calls.items():
            reply.set_result(self.faults[episodes[number]])
        if self._on_loss:
            self._on_loss(self)

    def _assign_faults(self, begun: Sequence[str], waiting: set[str], why: str) -> None:
        """Sets the fault of each episode, given those whose calls had begun, in order, and all that have calls."""
        hurt = (self.episodes | waiting) - self.faults.keys()
        suspects = [episode for episode in begun if episode in hurt] or list(hurt)[: len(hurt) == 1]
        for episode in hurt:
            if self._is_fault and episode in suspects[-1:]:
                of = f", in the last of {len(suspects)} calls" if len(suspects) > 1 else ""
                detail, is_shared = f"{why}{of}", self._on_loss is not None
                self.faults[episode] = EpisodeError(EnvironmentFailure.CRASHED, detail, alone=is_shared)
            else:
                detail = f"{why}, perhaps because of another episode"
                self.faults[episode] = EpisodeError(EnvironmentFailure.NEIGHBOR, detail)


class EpisodePool(WorkerPool[EpisodeWorker]):
    """Gives each episode to the worker with the fewest. A lost worker is replaced while the others continue.

    By default the workers play episodes of the class in `settings`.
    """

    def __init__(self, config: Config, settings: Mapping[str, object], executor: str = _OF_CLASSES):
        self._target = Target(
            executor,
            settings,
            lambda reason, detail, traceback: EpisodeError(EnvironmentFailure(reason), detail, traceback),
            failed=EnvironmentFailure.CRASHED,
            max_reply_bytes=2 * MAX_REPLY_BYTES,
            max_memory_bytes=int(config.max_memory_gib * 2**30),
            # The samples of a prompt group play on several workers and must meet the same world.
            same_hashes=True,
        )
        super().__init__([EpisodeWorker(self._target, "", self._lose) for _ in range(config.num_workers)])
        self._places: dict[str, EpisodeWorker] = {}
        self._isolated: set[str] = set()
        self._places_alone = asyncio.Semaphore(config.num_workers)
        self._retired: list[EpisodeWorker] = []  # each has a stuck call, and episodes that go on
        self._kills: set[asyncio.Task[None]] = set()

    def isolate(self, episode: str) -> None:
        """Gives the episode, which has not begun, a worker of its own. At most `num_workers` have one; others wait."""
        self._isolated.add(episode)

    def fault(self, episode: str) -> EpisodeError | None:
        """Returns why the episode cannot go on, if its worker is lost or its call is stuck."""
        return self._places[episode].faults.get(episode) if episode in self._places else None

    async def begin(self, episode: str, message: Mapping[str, object]) -> child.Reply:
        """Sends the first call of an episode, which stays on the worker that gets it."""
        if self.closed:
            raise _crashed("the run was closed")
        with off_the_clock():
            worker = await (self._start_isolated(episode) if episode in self._isolated else self._free())
        self._places[episode] = worker
        worker.episodes.add(episode)
        return await worker.play(episode, message)

    async def call(self, episode: str, message: Mapping[str, object]) -> child.Reply:
        return await self._places[episode].play(episode, message)

    async def end(self, episode: str) -> None:
        worker = self._places.pop(episode, None)
        if worker is None:
            self._isolated.discard(episode)
            return
        try:
            if worker.alive and episode not in worker.faults:
                await worker.play(episode, {"call": "end"})
        finally:
            worker.episodes.discard(episode)
            if episode in self._isolated:
                self._isolated.discard(episode)
                await worker.kill()
                self._places_alone.release()
            elif worker in self._retired and not worker.episodes:
                self._retired.remove(worker)
                await worker.kill()

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*(worker.kill() for worker in {*self._retired, *self._places.values()}), *self._kills)

    async def _start_isolated(self, episode: str) -> EpisodeWorker:
        await self._places_alone.acquire()
        worker = self._places[episode] = EpisodeWorker(self._target, self.version, None)
        await worker.start()
        return worker

    async def _free(self) -> EpisodeWorker:
        if not any(worker.alive for worker in self._workers):
            if not self._restarts:
                self._replace(self._workers[0])
            await asyncio.wait({*self._restarts}, return_when=asyncio.FIRST_COMPLETED)
        alive = [worker for worker in self._workers if worker.alive]
        if not alive:
            raise _crashed("no worker could be restarted; the service's log says why")
        return min(alive, key=lambda worker: len(worker.episodes))

    def _lose(self, worker: EpisodeWorker) -> None:
        """Puts another in the place of a worker that died or has a stuck call."""
        if not worker.alive and worker in self._retired:
            self._retired.remove(worker)
        if self.closed or worker not in self._workers:
            return
        self._replace(worker)
        if worker.alive:
            self._retired.append(worker)
        if len(self._retired) > len(self._workers):
            oldest = self._retired[0]
            keep(self._kills, oldest.kill(f"{len(self._retired)} workers have calls that do not end"))

    def _replace(self, worker: EpisodeWorker) -> None:
        fresh = EpisodeWorker(self._target, self.version, self._lose)
        self._workers = [fresh if one is worker else one for one in self._workers]
        self._restart(fresh)


def _crashed(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.CRASHED, detail)


class WorkerEnvironment(Environment):
    """Plays each episode with an object of `path`, a `module:Class`, made from `kwargs`.

    With `reasoning_tags`, it gets the turns without their reasoning.
    """

    def __init__(
        self,
        path: str,
        kwargs: Mapping[str, object],
        config: WorkerEnvironmentConfig,
        reasoning_tags: Sequence[str] = (),
    ):
        self._reasoning_tags = reasoning_tags
        self._workers = EpisodePool(config, {"path": path, "kwargs": kwargs})

    async def open(self) -> None:
        await self._workers.open()
        self.version, self.roles = f"1/{self._workers.version}", self._workers.facts["roles"]

    def isolate(self, episode_id: str) -> None:
        self._workers.isolate(episode_id)

    def fault(self, episode_id: str) -> EpisodeError | None:
        return self._workers.fault(episode_id)

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        line = await self._workers.begin(episode_id, {"call": "reset", "seed": seed, "row": row})
        return [Message(**message) for message in line["messages"]]

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        line = await self._workers.call(episode_id, {"call": "step", "text": turn.answer(self._reasoning_tags)})
        return Reply([Message(**message) for message in line["messages"]], line["reward"], line["done"])

    async def end(self, episode_id: str) -> None:
        await self._workers.end(episode_id)

    async def close(self) -> None:
        await self._workers.close()


def python(config: PythonEnvironmentConfig) -> Environment:
    return WorkerEnvironment(config.path, config.kwargs, config)


def textarena(config: TextArenaEnvironmentConfig) -> Environment:
    kwargs = {"game": config.game, "kwargs": config.kwargs}
    return WorkerEnvironment(f"{_LIBRARIES}:Game", kwargs, config, config.reasoning_tags)


def reasoning_gym(config: ReasoningGymEnvironmentConfig) -> Environment:
    kwargs = {"task": config.task, "kwargs": config.kwargs}
    return WorkerEnvironment(f"{_LIBRARIES}:Task", kwargs, config, config.reasoning_tags)
