"""Runs worker processes that each play many episodes and can be killed at any time.

services/reward/environments/worker.py describes the protocol.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.reward.environments.base import EnvironmentFailure, EpisodeError
from services.reward.environments.worker import MAX_REPLY_BYTES
from services.reward.processes.child import Child, Reply
from services.reward.processes.crew import Crew

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Time limit for a worker to import the class; its module may import torch."""
# How long a canceled call may take to end. A method that is not async cannot be interrupted, so its worker is killed.
_CANCEL_S = 2.0


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
    """Runs one process, many calls at the same time. Its episodes are lost if it dies; `on_death` is called then."""

    def __init__(self, target: Target, on_death: Callable[["Worker"], None]):
        self._target, self._on_death = target, on_death
        # The samples of a prompt group play on several workers and must meet the same world.
        self._child = Child("services.reward.environments.worker", 2 * MAX_REPLY_BYTES, same_hashes=True)
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.version = ""
        self.roles: Sequence[str] = ()
        self.alive = False
        self.num_starts = 0
        self.num_episodes = 0

    @property
    def pid(self) -> int:
        """Returns the id of the last started process; 0 if none was started."""
        return self._child.pid

    async def start(self) -> None:
        """Starts the process and waits until its class is imported.

        Raises:
            EpisodeError: CRASHED if the class cannot be imported, or its source has changed since the first start.
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
        self.alive, self.num_starts, self.num_episodes = True, self.num_starts + 1, 0
        self._reading = asyncio.create_task(self._read())

    async def call(self, message: Mapping[str, object]) -> Reply:
        """Sends a call and returns the reply. A canceled call that does not end within 2 s kills the process.

        Raises:
            EpisodeError: As the worker says; CRASHED if it died.
        """
        if not self.alive:
            raise _crashed("the worker died")
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            await self._child.write({"id": number, **message})
            answer = await asyncio.shield(reply)
        except OSError:  # it died: the reader reports why
            answer = await asyncio.shield(reply)
        except asyncio.CancelledError:
            await self._cancel(number, reply)
            raise
        if "reason" in answer:
            raise EpisodeError(EnvironmentFailure(answer["reason"]), str(answer["detail"]), answer.get("traceback", ""))
        return answer

    async def kill(self) -> None:
        """Kills the process and its children; calls in progress fail as CRASHED."""
        await self._child.kill()
        if self._reading:
            await asyncio.shield(self._reading)

    async def _cancel(self, number: int, reply: asyncio.Future[Reply]) -> None:
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self._child.write({"id": number, "call": "cancel"})
                await asyncio.wait({reply})
        except TimeoutError:
            log.warning("worker %d is killed: a call did not end within %g s", self.pid, _CANCEL_S)
            await self.kill()
        except OSError:
            return  # it died

    async def _read(self) -> None:
        """Hands replies to their calls until the process ends or writes something else."""
        try:
            while True:
                reply = await self._child.read()
                self._calls.pop(reply["id"]).set_result(reply)
        except (EOFError, OSError):
            why = f"the worker died with exit code {await self._child.exit_code()}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"the worker wrote a line that is too long or no reply: {type(error).__name__} {error}"
            await self._child.kill()
        self.alive = False
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.set_result({"reason": EnvironmentFailure.CRASHED, "detail": why})
        self._on_death(self)


class Workers(Crew[Worker]):
    """Gives each episode to the worker with the fewest. A dead worker is restarted while the others continue."""

    def __init__(self, target: Target, num_workers: int):
        super().__init__([Worker(target, self._replace) for _ in range(num_workers)])
        self._places: dict[str, tuple[Worker, int]] = {}

    @property
    def version(self) -> str:
        """Returns the version of the class that the workers loaded."""
        return self._workers[0].version

    @property
    def roles(self) -> Sequence[str]:
        """Returns the roles of the messages that the class may send."""
        return self._workers[0].roles

    async def begin(self, episode: str, message: Mapping[str, object]) -> Reply:
        """Sends the first call of an episode, which stays on the worker that gets it.

        Raises:
            EpisodeError: As in Worker.call.
        """
        if self._closed:
            raise _crashed("the run was closed")
        worker = await self._free()
        worker.num_episodes += 1
        self._places[episode] = worker, worker.num_starts
        return await worker.call({"episode": episode, **message})

    async def call(self, episode: str, message: Mapping[str, object]) -> Reply:
        """Sends a further call of an episode.

        Raises:
            EpisodeError: As in Worker.call; CRASHED if the worker was restarted since the episode began.
        """
        worker, num_starts = self._places[episode]
        if worker.num_starts != num_starts:
            raise _crashed("the worker died, and its episodes with it")
        return await worker.call({"episode": episode, **message})

    async def end(self, episode: str) -> None:
        """Ends an episode, if it is still there."""
        worker, num_starts = self._places.pop(episode, (None, 0))
        if worker is None or not worker.alive or worker.num_starts != num_starts:
            return
        try:
            await worker.call({"episode": episode, "call": "end"})
        finally:
            worker.num_episodes -= worker.num_starts == num_starts

    async def _free(self) -> Worker:
        if not any(worker.alive for worker in self._workers):
            if not self._restarts:
                self._restart(self._workers[0])
            await asyncio.wait({*self._restarts}, return_when=asyncio.FIRST_COMPLETED)
        alive = [worker for worker in self._workers if worker.alive]
        if not alive:
            raise _crashed("no worker could be restarted; the service's log says why")
        return min(alive, key=lambda worker: worker.num_episodes)

    def _replace(self, worker: Worker) -> None:
        if not self._closed:
            self._restart(worker)


def _crashed(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.CRASHED, detail)
