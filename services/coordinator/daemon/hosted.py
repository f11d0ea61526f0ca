"""Hosts one run in the daemon: its task, its state and the events that watchers read."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.common.config.run import Config
from services.common.errors import LockstepError, described
from services.coordinator.daemon.conversations import to_message
from services.coordinator.daemon.history import event_of, is_news, read_events
from services.coordinator.daemon.run_logs import logging_to
from services.coordinator.data.conversation import Conversation
from services.coordinator.observe.outcome import Outcome
from services.coordinator.rl.session import load_data, run_session
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run
from services.coordinator.services.launch import Addresses

log = logging.getLogger(__name__)


class HostedRun(Reporter):
    """Serves as frontend of a session in this process, and as its reporter once the training loop starts.

    Each watcher reads an append-only list of events at its own pace, so a slow watcher never delays the run.
    """

    console = None
    shows_samples = True

    def __init__(self, config: Config, given: Addresses):
        self.config, self.given = config, given
        self.state = pb.Run(
            name=config.name, state=pb.RUN_STATE_STARTING, num_steps=config.num_steps, run_dir=str(config.run_dir)
        )
        self.ended = asyncio.Event()
        self._events: list[pb.WatchRunResponse] = []
        self._changed = asyncio.Event()
        self._conversation: tuple[int, Conversation] | None = None
        self._run: Run | None = None
        self._session = asyncio.create_task(self._run_session(), name=f"run {config.name}")

    async def end(self) -> None:
        """Waits until the run has finished, stopped or failed, and sets `state` accordingly. Never raises."""
        await asyncio.wait([self._session])
        if self._session.cancelled():
            self.state.state = pb.RUN_STATE_STOPPED
        elif error := self._session.exception():
            self.state.state = pb.RUN_STATE_FAILED
            self.state.error = "{}: {}".format(*described(error))
        else:
            outcome = self._session.result()
            if self._run is None:  # it was finished before, and the loop has not begun
                self._events = read_events(Path(self.state.run_dir), up_to=outcome.version)
                self.state.version = outcome.version
            self.state.num_steps, is_done = outcome.num_steps, outcome.version >= outcome.num_steps
            self.state.state = pb.RUN_STATE_FINISHED if is_done else pb.RUN_STATE_STOPPED
            self.state.export_path = str(outcome.export_path or "")
        self.state.phase = ""
        self.ended.set()
        self._notify()

    def stop(self, *, now: bool) -> None:
        """Stops the run after the current step, or immediately if `now` is set or the loop has not started."""
        self.state.state = pb.RUN_STATE_STOPPING
        self._notify()
        is_open = self._run is not None and not self._run.is_closed
        if self._run is not None:
            self._run.stopping = True
        if now or not is_open:
            self._session.cancel()

    async def events(self, after: int) -> AsyncIterator[pb.WatchRunResponse]:
        """Yields all events after version `after`, and the state whenever it has changed, until the run ends."""
        sent, index = pb.Run(), 0
        while True:
            changed = self._changed
            while index < len(self._events):
                event, index = self._events[index], index + 1
                if is_news(event, after):
                    sent.CopyFrom(self.state)
                    yield self._with_conversation(with_state(event, self.state))
            if sent != self.state:
                sent.CopyFrom(self.state)
                yield pb.WatchRunResponse(run=self.state)
            elif self.ended.is_set():
                return
            else:
                await changed.wait()

    def start(self) -> None:
        pass

    def say(self, line: str) -> None:
        log.info(line)

    def begin(self, run: Run, version: int) -> Reporter:
        self._run = run
        self._events = read_events(Path(self.state.run_dir), up_to=version)
        self.state.run_id, self.state.version = run.run_id, version
        if self.state.state == pb.RUN_STATE_STARTING:
            self.state.state = pb.RUN_STATE_RUNNING
        self._notify()
        return self

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        self.state.phase = name
        self._notify()
        return nullcontext()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self.state.version = version
        self._events.append(event_of(version, metrics, is_step=True))
        self._notify()

    def conversation(self, version: int, conversation: Conversation) -> None:
        self._conversation = version, conversation

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        self._events.append(event_of(version, metrics, is_step=False))
        self._notify()

    def _with_conversation(self, answer: pb.WatchRunResponse) -> pb.WatchRunResponse:
        version, conversation = self._conversation or (0, None)
        if conversation and answer.step.version == version:
            answer.conversation.CopyFrom(to_message(conversation))
        return answer

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run_session(self) -> Outcome:
        with logging_to(self.config):
            try:
                # Tokenizing takes seconds; in a thread it blocks neither the event loop nor the other runs.
                data = await asyncio.to_thread(load_data, self.config, self.given)
                return await run_session(self.config, self.given, self, data)
            except Exception as error:
                log.error("run %s failed: %s", self.config.name, error, exc_info=not isinstance(error, LockstepError))
                raise


def with_state(event: pb.WatchRunResponse, run: pb.Run) -> pb.WatchRunResponse:
    """Returns a copy of `event` with the state of its run."""
    answer = pb.WatchRunResponse(run=run)
    answer.MergeFrom(event)
    return answer
