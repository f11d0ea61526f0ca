"""Rank 0 hands every command to all ranks, each with its own part, and waits for all of them.

JSON for the command, Arrow frames for samples, over ZeroMQ: nothing is pickled. A rank that raises says so with its
traceback even while others wait for it in a collective; those are then ended with the process group's processes.
A rank that is gone is the failure of all, and no rank stays without rank 0.

A command travels by its name, and a rank runs only those that its worker declares with `@rank_command`.
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

# After one rank failed with a typed error, the others are about to, unless they wait for it in a collective.
GRACE_S = 10.0
# From rank 0's start: the others were started with it, and import the same.
_COMING_S = 600.0
# A process that ends closes its connection; a host that is lost does not. ZeroMQ asks it this often, from a thread of
# its own, whatever the rank is busy with, and gives it up after so long without an answer.
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 30_000


Phase = Callable[[str, str], AbstractContextManager[None]]
"""Entered while all ranks run a command: its name and the role."""


@dataclass(frozen=True)
class Message:
    """One command or answer: plain values and frames."""

    body: dict[str, Any]
    frames: Sequence[bytes] = field(default=())

    def pack(self) -> list[bytes]:
        return [json.dumps(self.body).encode(), *self.frames]

    @classmethod
    def unpack(cls, parts: Sequence[bytes]) -> "Message":
        return cls(json.loads(parts[0]), parts[1:])


Command = Callable[..., Message | None]
"""A worker's method. It takes its arguments by keyword, and `frames` if it wants them."""

Marked = TypeVar("Marked", bound=Command)
_MARK = "_is_rank_command"


def rank_command(method: Marked) -> Marked:
    """Declares that rank 0 may call this method of a worker on every rank."""
    setattr(method, _MARK, True)
    return method


def commands_of(worker: object) -> Mapping[str, Command]:
    """Returns the methods of `worker` that are declared with `@rank_command`, by name."""
    names = {name for cls in type(worker).__mro__ for name, member in vars(cls).items() if hasattr(member, _MARK)}
    return {name: getattr(worker, name) for name in names}


class Ranks:
    """Rank 0's side. Commands run one after the other."""

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
        self._connections: dict[int, tuple[int, str]] = {}  # rank and host, by what ZeroMQ calls a connection by

    async def wait_for_all(self) -> None:
        """Returns once every rank has connected. From then on the loss of any is the failure of all.

        Raises:
            InternalError: Some did not within ten minutes.
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
        """Those on which the ranks are."""
        return len({host for _, host in self._connections.values()})

    async def end(self) -> None:
        """Lets all ranks end without a failure. Nothing can be called after it, and this process should end too."""
        for rank in range(self.num_ranks):
            with contextlib.suppress(zmq.ZMQError):  # it is gone
                await self._socket.send_multipart([str(rank).encode(), *Message({}).pack()])
        zmq.asyncio.Context.instance().destroy(linger=1000)  # returns when all is sent

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Returns when a rank is lost."""
        lost = None
        while lost is None:  # anybody may connect and go
            lost = self._connections.get((await recv_monitor_message(monitor))["value"])
        rank, host = lost
        why = f"rank {rank} on {host} is gone: its process has ended, or its host cannot be reached"
        self._fail(why, rank=str(rank), host=host)

    async def call(
        self, command: Command, parts: Sequence[Message] | None = None, *, grace_s: float = GRACE_S, **arguments: Any
    ) -> list[Message]:
        """Runs `command`, such as `Worker.train`, on all ranks; returns the answers in rank order.

        Every rank gets `arguments`, and the arguments and frames of its own part.

        A cancelled call goes on in the background: the ranks cannot be called back, and the next call waits for them.
        `grace_s` after the first typed error, those that have not answered have failed.

        Raises:
            LockstepError: As the first rank raised it, when all ranks have answered.
            InternalError: A rank failed with anything else; the trainer ends.
        """
        name = command.__name__
        return await asyncio.shield(self._call(name, parts or [Message({})] * self.num_ranks, grace_s, arguments))

    async def _call(
        self, name: str, parts: Sequence[Message], grace_s: float, arguments: dict[str, Any]
    ) -> list[Message]:
        async with self._turn:
            if self._failure:
                raise self._failure
            with self._phase(name, arguments.get("role", "policy")):
                for rank, part in enumerate(parts):
                    command = Message({"command": name, "arguments": arguments | part.body}, part.frames)
                    await self._send(rank, command)
                answers = await self._answers(name, grace_s)
        errors = [answer.body["error"] for answer in answers.values() if "error" in answer.body]
        if errors:  # as they came in; a rank that gives up has the others give up
            raise _rebuild(min(errors, key=lambda error: error["reason"] == Reason.EPOCH_ABORTED.value))
        return [answers[rank] for rank in range(self.num_ranks)]

    async def _send(self, rank: int, command: Message) -> None:
        try:
            await self._socket.send_multipart([str(rank).encode(), *command.pack()])
        except zmq.ZMQError as error:
            raise self._fail(f"rank {rank} is gone: {error}", rank=str(rank)) from error

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
        """What comes next; None if nothing came in time. Raises InternalError if a rank is lost before."""
        receiving: asyncio.Future[list[bytes]] = asyncio.ensure_future(self._socket.recv_multipart())
        await asyncio.wait({receiving, self._watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            return receiving.result()
        receiving.cancel()
        if self._failure:
            raise self._failure
        return None

    def _fail(self, message: str, **metadata: str) -> InternalError:
        """The trainer ends. Returns the first failure, whose consequences the others are."""
        if self._failure is None:
            self._failure = InternalError(message, reason=Reason.RANK_FAILED, **metadata)
            self._on_failure(message)
        return self._failure


def follow(rank: int, address: str, worker: object) -> bool:
    """Every rank's side: runs the commands of `worker` that rank 0 sends, until it says that no more will come.

    Returns:
        Whether rank 0 said so. If not it is gone, and the process should end.
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
            if not connection.poll(0):  # what came before the loss comes first
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
    """Returns the packed answer, whatever happens: others wait for it."""
    name, arguments = message.body["command"], message.body["arguments"]
    try:
        if (command := commands.get(name)) is None:
            raise LookupError(f"{name} is not a command of this rank")
        result = command(**arguments, frames=message.frames) if message.frames else command(**arguments)
        return (result or Message({})).pack()
    except LockstepError as error:
        log.warning("rank %d: %s: %s", rank, name, error.message)
        return Message({"error": _describe(error, type(error).__name__)}).pack()
    except BaseException as error:  # also torch's; and the answer ends the whole trainer
        log.exception("rank %d failed in %s", rank, name)
        where = {"rank": str(rank), "host": socket.gethostname(), "traceback": traceback.format_exc(limit=-8)}
        why = f"rank {rank} on {where['host']}: {type(error).__name__}: {error}"
        return Message({"error": {"class": None, "reason": None, "message": why, "metadata": where}}).pack()


def _describe(error: LockstepError, name: str) -> dict[str, Any]:
    return {"class": name, "reason": error.reason.value, "message": error.message, "metadata": error.metadata}


def _rebuild(error: dict[str, Any]) -> LockstepError:
    cls = next(cls for cls in ERROR_CLASSES if cls.__name__ == error["class"])
    return cls(error["message"], reason=Reason(error["reason"]), **error["metadata"])
