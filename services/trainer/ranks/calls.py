"""Sends every command from rank 0 to all ranks, with each rank's own data, and collects their answers.

Commands travel over ZeroMQ as JSON, and samples as Arrow frames; nothing is pickled. A rank runs only the methods that
its worker declares with `@rank_command`; a command names one of them.

A rank that raises sends its traceback at once, even while other ranks wait for it in a collective; those end when the
trainer's processes end. If a rank is lost, the whole trainer fails; if rank 0 is lost, every rank exits.
"""

import asyncio
import contextlib
import json
import logging
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from services.common.errors import ERROR_CLASSES, InternalError, LockstepError, Reason

log = logging.getLogger(__name__)

# After one rank raised a typed error, the others will soon raise it too, unless they wait for it in a collective.
GRACE_S = 10.0
# How long rank 0 waits for the others to connect. They start at the same time and import the same modules.
_COMING_S = 600.0
# A process that exits closes its connection, but a host that fails does not. ZeroMQ therefore sends heartbeats from its
# own thread, whatever the rank is busy with, and closes a connection that has been silent for too long.
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 30_000


Phase = Callable[[str, str], AbstractContextManager[None]]
"""Takes a command's name and role; returns a context manager that is entered while all ranks run the command."""


@dataclass(frozen=True)
class Message:
    """A command or an answer: a body of JSON values, and frames of bytes."""

    body: dict[str, Any]
    frames: Sequence[bytes] = field(default=())

    def pack(self) -> list[bytes]:
        return [json.dumps(self.body).encode(), *self.frames]

    @classmethod
    def unpack(cls, parts: Sequence[bytes]) -> "Message":
        return cls(json.loads(parts[0]), parts[1:])


Command = Callable[..., Message | None]
"""A method of a worker. It takes its arguments by keyword, and `frames` if the message has any."""

Marked = TypeVar("Marked", bound=Command)
_MARK = "_is_rank_command"


def rank_command(method: Marked) -> Marked:
    """Allows rank 0 to call this method of a worker on every rank."""
    setattr(method, _MARK, True)
    return method


def commands_of(worker: object) -> Mapping[str, Command]:
    """Returns the methods of `worker` that `@rank_command` declares, by name."""
    names = {name for cls in type(worker).__mro__ for name, member in vars(cls).items() if hasattr(member, _MARK)}
    return {name: getattr(worker, name) for name in names}


class Ranks:
    """Calls commands on all ranks from rank 0, one command after the other."""

    def __init__(
        self, num_ranks: int, host: str, on_failure: Callable[[str], None], phase: Phase = lambda *_: nullcontext()
    ):
        self.num_ranks, self._phase = num_ranks, phase
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        _send_heartbeats(self._socket)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._on_failure = on_failure
        self._turn = asyncio.Lock()
        self._failure: InternalError | None = None
        self._connections: dict[int, tuple[int, str]] = {}  # file descriptor -> rank and host

    async def wait_for_all(self) -> None:
        """Waits until every rank has connected. From then on the loss of any rank is a failure of the trainer.

        Raises:
            InternalError: A rank did not connect within ten minutes.
        """
        missing = set(range(self.num_ranks))
        try:
            async with asyncio.timeout(_COMING_S):
                while missing:
                    sender, host = await self._socket.recv_multipart(copy=False)
                    rank = int(sender.bytes)
                    self._connections[host.get(zmq.SRCFD)] = (rank, host.bytes.decode())
                    missing.discard(rank)
        except TimeoutError as error:
            raise self._fail(f"ranks {sorted(missing)} did not connect within {_COMING_S:g} s") from error
        self._watching = asyncio.create_task(self._watch(self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)))

    @property
    def num_hosts(self) -> int:
        """Returns the number of hosts that the ranks run on."""
        return len({host for _, host in self._connections.values()})

    async def end(self) -> None:
        """Tells all ranks to exit normally. No command can be called afterwards, and this process should exit too."""
        for rank in range(self.num_ranks):
            with contextlib.suppress(zmq.ZMQError):  # the rank has exited already
                await self._socket.send_multipart([str(rank).encode(), *Message({}).pack()])
        zmq.asyncio.Context.instance().destroy(linger=1000)  # returns when all messages are sent

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Waits until a rank is lost, and then ends the trainer."""
        lost = None
        while lost is None:  # ignores connections that are not a rank's
            lost = self._connections.get((await recv_monitor_message(monitor))["value"])
        rank, host = lost
        why = f"rank {rank} on {host} is gone: its process has ended, or its host cannot be reached"
        self._fail(why, rank=str(rank), host=host)

    async def call(
        self, command: Command, parts: Sequence[Message] | None = None, *, grace_s: float = GRACE_S, **arguments: Any
    ) -> list[Message]:
        """Runs `command`, such as `Worker.train`, on all ranks. Returns their answers in rank order.

        Every rank gets `arguments`, and the arguments and frames of its own part.

        The ranks cannot interrupt a command, so a canceled call goes on in the background and the next call waits for
        its answers. Ranks that have not answered `grace_s` seconds after the first typed error count as failed.

        Raises:
            LockstepError: A rank raised this typed error. Raised when all ranks have answered.
            InternalError: A rank was lost or raised any other error. The trainer ends.
        """
        name = command.__name__
        return await asyncio.shield(self._call(name, parts or [Message({})] * self.num_ranks, grace_s, arguments))

    async def _call(
        self, name: str, parts: Sequence[Message], grace_s: float, arguments: dict[str, Any]
    ) -> list[Message]:
        commands = [Message({"command": name, "arguments": arguments | part.body}, part.frames) for part in parts]
        async with self._turn:
            if self._failure:
                raise self._failure
            with self._phase(name, arguments.get("role", "policy")):
                for rank, command in enumerate(commands):
                    try:
                        await self._socket.send_multipart([str(rank).encode(), *command.pack()])
                    except zmq.ZMQError as error:
                        raise self._fail(f"rank {rank} is gone: {error}", rank=str(rank)) from error
                answers = await self._answers(name, grace_s)
        errors = [answer.body["error"] for answer in answers.values() if "error" in answer.body]
        if errors:  # in order of arrival; EPOCH_ABORTED comes last, because it is what another rank's error causes
            raise _rebuild(min(errors, key=lambda error: error["reason"] == Reason.EPOCH_ABORTED.value))
        return [answers[rank] for rank in range(self.num_ranks)]

    async def _answers(self, name: str, grace_s: float) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        timeout_s: float | None = None
        while len(answers) < self.num_ranks:
            received = await self._received(timeout_s)
            if received is None:
                missing = sorted(set(range(self.num_ranks)) - set(answers))
                raise self._fail(f"{name}: ranks {missing} did not answer")
            sender, *parts = received
            answer = answers[int(sender)] = Message.unpack(parts)
            if "error" in answer.body:
                timeout_s = grace_s
                if answer.body["error"]["class"] is None:
                    message, metadata = answer.body["error"]["message"], answer.body["error"]["metadata"]
                    raise self._fail(f"{name}: {message}", **metadata)
        return answers

    async def _received(self, timeout_s: float | None) -> list[bytes] | None:
        """Returns the next message, or None after the timeout. Raises InternalError if a rank is lost meanwhile."""
        receiving: asyncio.Future[list[bytes]] = asyncio.ensure_future(self._socket.recv_multipart())
        await asyncio.wait({receiving, self._watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            return receiving.result()
        receiving.cancel()
        if self._failure:
            raise self._failure
        return None

    def _fail(self, message: str, **metadata: str) -> InternalError:
        """Ends the trainer. Returns the first failure, since later ones are its consequences."""
        if self._failure is None:
            self._failure = InternalError(message, reason=Reason.RANK_FAILED, **metadata)
            self._on_failure(message)
        return self._failure


def follow(rank: int, address: str, worker: object) -> bool:
    """Runs the commands that rank 0 sends, on `worker`, until rank 0 ends the trainer or is lost. Runs on every rank.

    Returns:
        True if rank 0 ended the trainer; False if it was lost, and the process should exit with an error.
    """
    commands = commands_of(worker)
    with zmq.Context.instance().socket(zmq.DEALER) as connection:
        connection.setsockopt(zmq.IDENTITY, str(rank).encode())
        connection.setsockopt(zmq.LINGER, 1000)
        _send_heartbeats(connection)
        poller = zmq.Poller()
        poller.register(connection, zmq.POLLIN)
        lost = connection.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        poller.register(lost, zmq.POLLIN)
        connection.connect(address)
        connection.send(socket.gethostname().encode())
        while True:
            poller.poll()
            if not connection.poll(0):  # messages that arrived before the loss are handled first
                log.error("rank %d ends: rank 0 at %s is gone", rank, address)
                return False
            message = Message.unpack(connection.recv_multipart())
            if not message.body:
                return True
            connection.send_multipart(_run(rank, commands, message))


def _send_heartbeats(to_others: zmq.Socket) -> None:
    to_others.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    to_others.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


def _run(rank: int, commands: Mapping[str, Command], message: Message) -> list[bytes]:
    """Runs one command and returns its packed answer. Never raises, because rank 0 waits for the answer."""
    name, arguments = message.body["command"], message.body["arguments"]
    try:
        if (command := commands.get(name)) is None:
            raise LookupError(f"{name} is not a command of this rank")
        result = command(**arguments, frames=message.frames) if message.frames else command(**arguments)
        return (result or Message({})).pack()
    except LockstepError as error:
        log.warning("rank %d: %s: %s", rank, name, error.message)
        return Message({"error": _describe(error, type(error).__name__)}).pack()
    except BaseException as error:  # some of torch's errors are no Exception; this answer ends the trainer
        log.exception("rank %d failed in %s", rank, name)
        where = {"rank": str(rank), "host": socket.gethostname(), "traceback": traceback.format_exc(limit=-8)}
        why = f"rank {rank} on {where['host']}: {type(error).__name__}: {error}"
        return Message({"error": {"class": None, "reason": None, "message": why, "metadata": where}}).pack()


def _describe(error: LockstepError, name: str) -> dict[str, Any]:
    return {"class": name, "reason": error.reason.value, "message": error.message, "metadata": error.metadata}


def _rebuild(error: dict[str, Any]) -> LockstepError:
    cls = next(cls for cls in ERROR_CLASSES if cls.__name__ == error["class"])
    return cls(error["message"], reason=Reason(error["reason"]), **error["metadata"])
