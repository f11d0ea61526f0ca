"""Runs worker processes that each play many episodes and can be killed at any time.

services/reward/environments/worker.py describes the protocol. An episode hurts others as little as can be:

- A call that does not end when it is canceled is stuck, mostly in a thread. Its worker gets no more episodes, and ends
  once its others have ended; another takes its place.
- If a worker dies, or stalls so that it has to be killed, the call that began last is the likeliest cause. The other
  episodes fail as NEIGHBOR; so do all of them if none had a call in progress.
- An episode can be isolated: it gets a process of its own.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.reward.environments.base import off_the_clock
from services.reward.environments.worker import CANCEL_S, MAX_REPLY_BYTES
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes.child import Child, Reply
from services.reward.processes.crew import Crew

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Time limit for a worker to import the class; its module may import torch."""
# How much longer than a stuck call a worker may be silent about its cancellation before it counts as stalled.
_SILENCE_S = 2.0


@dataclass(frozen=True)
class Target:
    """Names the class that a worker runs. Its fields are the first line that the worker gets."""

    target: str
    """Class, as `module:Class`."""
    kwargs: Mapping[str, object]
    """Keyword arguments for the class."""
    max_memory_bytes: int
    """Limit of the worker's address space."""


class Worker:
    """Runs one process, once, with many calls at the same time. Its episodes are lost if it dies."""

    def __init__(
        self, target: Target, on_loss: Callable[["Worker"], None], *, version: str = "", is_shared: bool = True
    ):
        """Prepares a process.

        Args:
            target: What it runs.
            on_loss: Is called when it must get no further episodes, because it died or a call is stuck.
            version: That of the class when the run began; empty for the run's first workers.
            is_shared: Whether it plays more than one episode.
        """
        self._target, self._on_loss, self._is_shared = target, on_loss, is_shared
        # The samples of a prompt group play on several workers and must meet the same world.
        self._child = Child("services.reward.environments.worker", 2 * MAX_REPLY_BYTES, same_hashes=True)
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[str, asyncio.Future[Reply | EpisodeError]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._last_begun, self._why_killed, self._is_fault = -1, "", True
        self.version = version
        self.roles: Sequence[str] = ()
        self.alive = False
        self.episodes: set[str] = set()
        """Episodes that have begun here and not ended."""
        self.faults: dict[str, EpisodeError] = {}
        """Why episodes cannot go on here."""

    @property
    def pid(self) -> int:
        """Returns the id of the process; 0 if it was not started."""
        return self._child.pid

    async def start(self) -> None:
        """Starts the process and waits until its class is imported.

        Raises:
            EpisodeError: CRASHED if the class cannot be imported, or its source has changed since the run began.
        """
        started = False
        try:
            await self._child.start()
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._child.write(vars(self._target))
                reply = await self._child.read()
            if "reason" in reply:
                raise _crashed(reply["detail"])
            if self.version not in ("", reply["version"]):
                raise _crashed("its source changed since OpenRun; close and reopen the run")
            self.version, self.roles, started = reply["version"], reply["roles"], True
        except TimeoutError:
            raise _crashed(f"a worker did not start within {START_TIMEOUT_S:g} s") from None
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            raise _crashed(f"a worker did not start: {type(error).__name__} {error}") from error
        finally:
            if not started:
                await self._child.kill()
        self.alive = True
        self._reading = asyncio.create_task(self._read())

    async def call(self, episode: str, message: Mapping[str, object]) -> Reply:
        """Sends a call of an episode and returns the reply.

        Raises:
            EpisodeError: As the worker says; the episode's fault if the worker died.
        """
        if not self.alive or episode in self.faults:
            raise self.faults.get(episode) or _crashed("the worker died")
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = episode, reply
        try:
            await self._child.write({"id": number, "episode": episode, **message})
            answer = await asyncio.shield(reply)
        except OSError:  # it died: the reader reports why
            answer = await asyncio.shield(reply)
        except asyncio.CancelledError:
            await self._cancel(number, episode, reply)
            raise
        if isinstance(answer, EpisodeError):
            raise answer
        if "reason" in answer:
            raise EpisodeError(EnvironmentFailure(answer["reason"]), str(answer["detail"]), answer.get("traceback", ""))
        return answer

    async def kill(self, why: str = "the run was closed", *, is_fault: bool = False) -> None:
        """Kills the process and its children, for the reason `why`, which may be the fault of a call in progress."""
        if not self._why_killed:
            self._why_killed, self._is_fault = why, is_fault
        await self._child.kill()
        if self._reading:
            await asyncio.shield(self._reading)

    async def _cancel(self, number: int, episode: str, reply: asyncio.Future[Reply | EpisodeError]) -> None:
        try:
            async with asyncio.timeout(CANCEL_S + _SILENCE_S):
                await self._child.write({"id": number, "call": "cancel"})
                await asyncio.wait({reply})
        except TimeoutError:
            log.warning("worker %d is killed: it does not react any more", self.pid)
            await self.kill("the worker did not react any more and was killed", is_fault=True)
        except OSError:  # it died, and the reader finds out why
            await asyncio.wait({reply})
        answer = reply.result() if reply.done() else {}
        if not isinstance(answer, EpisodeError) and "stuck" in answer:
            log.warning("worker %d gets no more episodes: a call of %s does not end", self.pid, episode)
            detail = "an earlier call of the episode does not end"
            self.faults[episode] = EpisodeError(EnvironmentFailure.TIMEOUT, detail, alone=self._is_shared)
            self._on_loss(self)

    async def _read(self) -> None:
        """Hands replies to their calls until the process ends or writes something else."""
        try:
            while True:
                reply = await self._child.read()
                if "began" in reply:
                    self._last_begun = reply["id"]
                else:
                    self._calls.pop(reply["id"])[1].set_result(reply)
        except (EOFError, OSError):
            why = f"the worker died with exit code {await self._child.exit_code()}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"the worker wrote a line that is too long or no reply: {type(error).__name__} {error}"
            await self._child.kill()
        self.alive = False
        calls, self._calls = self._calls, {}
        in_calls = [episode for number, (episode, _) in calls.items() if number <= self._last_begun]
        self._blame(in_calls, {episode for episode, _ in calls.values()}, self._why_killed or why)
        for episode, reply in calls.values():
            reply.set_result(self.faults[episode])
        self._on_loss(self)

    def _blame(self, begun: Sequence[str], waiting: set[str], why: str) -> None:
        """Sets the fault of each episode, given those whose calls had begun, in order, and all that have calls."""
        hurt = (self.episodes | waiting) - self.faults.keys()
        suspects = [episode for episode in begun if episode in hurt] or list(hurt)[: len(hurt) == 1]
        for episode in hurt:
            if self._is_fault and episode in suspects[-1:]:
                of = f", in the last of {len(suspects)} calls" if len(suspects) > 1 else ""
                self.faults[episode] = EpisodeError(EnvironmentFailure.CRASHED, f"{why}{of}", alone=self._is_shared)
            else:
                detail = f"{why}, perhaps because of another episode"
                self.faults[episode] = EpisodeError(EnvironmentFailure.NEIGHBOR, detail)


class Workers(Crew[Worker]):
    """Gives each episode to the worker with the fewest. A lost worker is replaced while the others continue."""

    def __init__(self, target: Target, num_workers: int):
        self._target = target
        self.version = ""
        """Version of the class that the workers loaded."""
        self.roles: Sequence[str] = ()
        """Roles of the messages that the class may send."""
        super().__init__([self._make() for _ in range(num_workers)])
        self._places: dict[str, Worker] = {}
        self._isolated: set[str] = set()
        self._places_alone = asyncio.Semaphore(num_workers)
        self._retired: list[Worker] = []  # each has a stuck call, and episodes that go on
        self._kills: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await super().open()
        self.version, self.roles = self._workers[0].version, self._workers[0].roles

    def isolate(self, episode: str) -> None:
        """Gives the episode, which has not begun, a worker of its own. At most `num_workers` have one; others wait."""
        self._isolated.add(episode)

    def fault(self, episode: str) -> EpisodeError | None:
        """Returns why the episode cannot go on, if its worker is lost or its call is stuck."""
        return self._places[episode].faults.get(episode) if episode in self._places else None

    async def begin(self, episode: str, message: Mapping[str, object]) -> Reply:
        """Sends the first call of an episode, which stays on the worker that gets it.

        Raises:
            EpisodeError: As in Worker.call.
        """
        if self._closed:
            raise _crashed("the run was closed")
        with off_the_clock():
            worker = await (self._own(episode) if episode in self._isolated else self._free())
        self._places[episode] = worker
        worker.episodes.add(episode)
        return await worker.call(episode, message)

    async def call(self, episode: str, message: Mapping[str, object]) -> Reply:
        """Sends a further call of an episode.

        Raises:
            EpisodeError: As in Worker.call.
        """
        return await self._places[episode].call(episode, message)

    async def end(self, episode: str) -> None:
        """Ends an episode, if it is still there."""
        worker = self._places.pop(episode, None)
        if worker is None:
            self._isolated.discard(episode)
            return
        try:
            if worker.alive and episode not in worker.faults:
                await worker.call(episode, {"call": "end"})
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

    async def _own(self, episode: str) -> Worker:
        await self._places_alone.acquire()
        worker = self._places[episode] = self._make(is_shared=False)
        await worker.start()
        return worker

    async def _free(self) -> Worker:
        if not any(worker.alive for worker in self._workers):
            if not self._restarts:
                self._replace(self._workers[0])
            await asyncio.wait({*self._restarts}, return_when=asyncio.FIRST_COMPLETED)
        alive = [worker for worker in self._workers if worker.alive]
        if not alive:
            raise _crashed("no worker could be restarted; the service's log says why")
        return min(alive, key=lambda worker: len(worker.episodes))

    def _make(self, *, is_shared: bool = True) -> Worker:
        on_loss = self._lose if is_shared else lambda _: None
        return Worker(self._target, on_loss, version=self.version, is_shared=is_shared)

    def _lose(self, worker: Worker) -> None:
        """Puts another in the place of a worker that died or has a stuck call."""
        if not worker.alive and worker in self._retired:
            self._retired.remove(worker)
        if self._closed or worker not in self._workers:
            return
        self._replace(worker)
        if worker.alive:
            self._retired.append(worker)
        if len(self._retired) > len(self._workers):
            oldest = self._retired[0]
            kill = asyncio.create_task(oldest.kill(f"{len(self._retired)} workers have calls that do not end"))
            self._kills.add(kill)
            kill.add_done_callback(self._kills.discard)

    def _replace(self, worker: Worker) -> None:
        fresh = self._make()
        self._workers = [fresh if one is worker else one for one in self._workers]
        self._restart(fresh)


def _crashed(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.CRASHED, detail)
