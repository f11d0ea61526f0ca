"""Sends every command from rank 0 to all ranks, with each rank's own data, and collects their answers.

Commands travel over ZeroMQ as JSON, and samples as Arrow frames; nothing is pickled. A rank runs only the methods that
its worker declares with `@rank_command`; a command names one of them. Every command has an id that its answers repeat,
so that a late or repeated answer is never taken for the answer to another command.

A rank that raises sends its traceback at once, even while other ranks wait for it in a collective; those end when the
trainer's processes end. If a rank is lost, the whole trainer fails; if rank 0 is lost, every rank exits.

Only a process that knows rank 0's key can connect. The connections use CurveZMQ (rfc.zeromq.org/spec/26), which
encrypts and authenticates. A client needs the server's public key for its first message, and that key is never sent in
the clear. Rank 0 makes a new key pair at each start and gives the public key only to its ranks, so that the key serves
as their secret.
"""

import asyncio
import ipaddress
import itertools
import json
import logging
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from services.common.errors import ERROR_CLASSES, InternalError, InvalidInput, LockstepError, Reason
from services.common.json_values import JsonObject
from services.common.rpc.address import route_to

# A process that exits closes its connection, but a host that fails does not. ZeroMQ therefore sends heartbeats from its
# own thread, whatever the rank is busy with, and closes a connection that has been silent for too long.
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 30_000


@dataclass(frozen=True)
class RanksAddress:
    """The address on which rank 0 listens for its ranks, and the key that they need to connect."""

    url: str
    key: str = field(repr=False)

    def pack(self) -> str:
        """Returns JSON, for the store where the ranks meet."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, packed: str | bytes) -> "RanksAddress":
        return cls(**json.loads(packed))


def listen(host: str) -> tuple[zmq.asyncio.Socket, RanksAddress]:
    """Returns rank 0's socket, which listens on a free port of `host`, and its address with a new key."""
    listener = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    # Otherwise a message to a rank that is gone would be dropped without an error.
    listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
    listener.setsockopt(zmq.LINGER, 0)
    listener.setsockopt(zmq.SNDHWM, 0)  # no limit, so that sending never waits
    _send_heartbeats(listener)
    key, secret_key = zmq.curve_keypair()
    listener.curve_server = True
    listener.curve_secretkey = secret_key
    port = listener.bind_to_random_port(f"tcp://{host}")
    return listener, RanksAddress(f"tcp://{host}:{port}", key.decode())


@contextmanager
def connect(rank: int, address: RanksAddress) -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    """Connects `rank` to rank 0. Yields the connection, and a socket that becomes readable when it is lost."""
    with zmq.Context.instance().socket(zmq.DEALER) as connection:
        connection.setsockopt(zmq.IDENTITY, str(rank).encode())
        connection.setsockopt(zmq.LINGER, 1000)
        _send_heartbeats(connection)
        connection.curve_publickey, connection.curve_secretkey = zmq.curve_keypair()
        connection.curve_serverkey = address.key.encode()
        lost = connection.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        connection.connect(address.url)
        connection.send(socket.gethostname().encode())
        yield connection, lost


def _send_heartbeats(to_others: zmq.Socket) -> None:
    to_others.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    to_others.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


def use_interface_to(host: str) -> None:
    """Makes gloo use the interface that reaches `host`, unless GLOO_SOCKET_IFNAME names another.

    By default gloo uses the address that this host's own name resolves to, which on many hosts is loopback.

    Raises:
        InvalidInput: No interface has the source address that the kernel uses to reach `host`.
    """
    route = route_to(host)
    if not route.interface:
        raise InvalidInput(
            f"no interface of this host has {route.address}, the source address for {host}", field="master-addr"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", route.interface)


def published_host(host: str) -> str:
    """Returns the host to publish for a service that listens on `host`: empty if it listens on every interface."""
    try:
        return "" if ipaddress.ip_address(host.strip("[]")).is_unspecified else host
    except ValueError:
        return host  # a name, not an address


log = logging.getLogger(__name__)

# torch raises a plain RuntimeError if the CPU's allocator fails (c10/core/impl/alloc_cpu.cpp).
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def out_of_memory_hint(error: BaseException, role: str) -> str:
    """Returns what to change after an out-of-memory error in a command of `role`; "" after any other error."""
    import torch  # late: commands and their answers need no torch otherwise

    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and _CPU_ALLOCATOR not in str(error):
        return ""
    section = "trainer" if role == "policy" else role
    return (
        f"; out of memory: lower {section}.max_tokens_per_microbatch, set trainer.gradient_checkpointing=true, or use "
        "more ranks; `lockstep plan` shows what each phase needs"
    )


# After one rank raised a typed error, the others will soon raise it too, unless they wait for it in a collective.
GRACE_S = 10.0
# How long rank 0 waits for the others to connect. They start at the same time and import the same modules.
_COMING_S = 600.0
# A rank that is lost breaks the others' collectives, and their errors may come before rank 0 notices the loss. It waits
# this long after such an error, so that the failure names the rank that was lost.
_LOSS_S = 1.0
_GREETING = b"hello"


Phase = Callable[[str, str], AbstractContextManager[object]]
"""Takes a command's name and role; returns a context manager that is entered while all ranks run the command."""


@dataclass(frozen=True)
class Message:
    """A command or an answer: a body of JSON values, and frames of bytes."""

    body: JsonObject
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


class Ranks:
    """Calls commands on all ranks from rank 0, one command after the other."""

    def __init__(
        self, num_ranks: int, host: str, on_failure: Callable[[str], None], phase: Phase = lambda *_: nullcontext()
    ):
        self.num_ranks, self._phase = num_ranks, phase
        self._socket, self.address = listen(host)
        self._on_failure = on_failure
        self._turn = asyncio.Lock()
        self._ids = (f"call {number}".encode() for number in itertools.count())
        self._answering: asyncio.Task[list[Message]] | None = None  # collects the answers to the last command
        self._failure: InternalError | None = None
        self._connections: dict[int, tuple[int, str]] = {}  # file descriptor -> rank and host

    async def wait_for_all(self) -> None:
        """Waits until every rank has connected. From then on the loss of any rank is a failure of the trainer.

        Raises:
            InternalError: A rank did not connect within ten minutes, or was lost meanwhile.
        """
        missing = set(range(self.num_ranks))
        try:
            async with asyncio.timeout(_COMING_S):
                while missing:
                    # Only frames that were not copied know their connection, by whose number a loss is reported.
                    sender, host = await self._socket.recv_multipart(copy=False)
                    rank = int(sender.bytes)
                    self._connections[host.get(zmq.SRCFD)] = (rank, host.bytes.decode())
                    missing.discard(rank)
        except TimeoutError as error:
            raise self._fail(f"ranks {sorted(missing)} did not connect within {_COMING_S:g} s") from error
        self._watching = asyncio.create_task(self._watch(self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)))
        missing = set(range(self.num_ranks))
        for rank in missing:
            await self._send(rank, [_GREETING])
        while missing:  # a rank that was lost before it was watched never answers
            answer = await self._received(_COMING_S)
            if answer is None:
                raise self._fail(f"ranks {sorted(missing)} connected, but did not answer within {_COMING_S:g} s")
            missing.discard(int(answer[0]))

    async def _send(self, rank: int, parts: Sequence[bytes]) -> None:
        """Sends `parts` to `rank`. Never waits, so that a canceled call was sent to all ranks or to none."""
        try:
            await self._socket.send_multipart([b"%d" % rank, *parts], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise self._fail(f"rank {rank} is gone: {error}", rank=str(rank)) from error

    @property
    def num_hosts(self) -> int:
        return len({host for _, host in self._connections.values()})

    async def end(self) -> None:
        """Tells all ranks to exit normally. No command can be called afterwards, and this process should exit too."""
        for rank in range(self.num_ranks):
            with suppress(zmq.ZMQError):  # the rank has exited already
                await self._socket.send_multipart([b"%d" % rank, b"end", *Message({}).pack()])
        zmq.asyncio.Context.instance().destroy(linger=1000)  # returns when all messages are sent

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
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

        The ranks cannot interrupt a command: if a call is canceled after it was sent, the next call waits for its
        answers. Ranks that have not answered `grace_s` seconds after the first typed error count as failed.

        Raises:
            LockstepError: A rank raised this typed error. Raised when all ranks have answered.
            InternalError: A rank was lost or raised any other error. The trainer ends.
        """
        name, call_id = command.__name__, next(self._ids)
        async with self._turn:
            if self._answering:
                await asyncio.wait({self._answering})
            if self._failure:
                raise self._failure
            for rank, part in enumerate(parts or [Message({})] * self.num_ranks):
                message = Message({"command": name, "arguments": arguments | part.body}, part.frames)
                await self._send(rank, [call_id, *message.pack()])
            phase = self._phase(name, arguments.get("role", "policy"))
            self._answering = asyncio.create_task(self._answers(name, call_id, phase, grace_s))
            # Retrieves the error, which asyncio would log if the call was canceled. The ranks have logged it.
            self._answering.add_done_callback(lambda answering: answering.cancelled() or answering.exception())
            return await asyncio.shield(self._answering)

    async def _answers(
        self, name: str, call_id: bytes, phase: AbstractContextManager[object], grace_s: float
    ) -> list[Message]:
        answers: dict[int, Message] = {}
        errors: list[JsonObject] = []
        with phase:
            while missing := [rank for rank in range(self.num_ranks) if rank not in answers]:
                received = await self._received(grace_s if errors else None)
                if received is None:
                    raise self._fail(f"{name}: ranks {missing} did not answer after: {errors[0]['message']}")
                sender, answers_to, *parts = received
                if answers_to != call_id or int(sender) not in missing:
                    log.warning(
                        "%s: dropped a late or repeated message of rank %s: %r", name, sender.decode(), answers_to
                    )
                    continue
                answer = answers[int(sender)] = Message.unpack(parts)
                if error := answer.body.get("error"):
                    errors.append(await self._typed(name, error))
        if errors:  # in order of arrival; EPOCH_ABORTED comes last, because it is what another rank's error causes
            error = min(errors, key=lambda error: error["reason"] == Reason.EPOCH_ABORTED.value)
            cls = next(cls for cls in ERROR_CLASSES if cls.__name__ == error["class"])
            raise cls(error["message"], reason=Reason(error["reason"]), **error["metadata"])
        return [answers[rank] for rank in range(self.num_ranks)]

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

    async def _typed(self, name: str, error: JsonObject) -> JsonObject:
        """Returns the error of a rank if it is one of Lockstep's own; ends the trainer otherwise."""
        if error["class"] is None:
            await asyncio.wait({self._watching}, timeout=_LOSS_S)
            raise self._fail(f"{name}: {error['message']}", **error["metadata"])
        return error

    def _fail(self, message: str, **metadata: str) -> InternalError:
        """Ends the trainer. Returns the first failure, since later ones are its consequences."""
        if self._failure is None:
            self._failure = InternalError(message, reason=Reason.RANK_FAILED, **metadata)
            self._on_failure(message)
        return self._failure


def follow(rank: int, address: RanksAddress, worker: object) -> bool:
    """Runs the commands that rank 0 sends, on `worker`, until rank 0 ends the trainer or is lost. Runs on every rank.

    Returns:
        True if rank 0 ended the trainer; False if it was lost, and the process should exit with an error.
    """
    names = [name for name in dir(type(worker)) if hasattr(getattr(type(worker), name), _MARK)]
    commands: dict[str, Command] = {name: getattr(worker, name) for name in names}
    with connect(rank, address) as (connection, lost):
        while True:
            zmq.select([connection, lost], [], [])
            if not connection.poll(0):  # messages that arrived before the loss are handled first
                log.error("rank %d ends: rank 0 at %s is gone", rank, address.url)
                return False
            call_id, *parts = connection.recv_multipart()
            if call_id == _GREETING:
                connection.send(_GREETING)
                continue
            message = Message.unpack(parts)
            if not message.body:
                return True
            name, frames = message.body["command"], {"frames": message.frames} if message.frames else {}
            try:
                answer = (commands[name](**message.body["arguments"], **frames) or Message({})).pack()
            except LockstepError as error:
                log.warning("rank %d: %s: %s", rank, name, error.message)
                content = {"reason": error.reason.value, "message": error.message, "metadata": error.metadata}
                answer = Message({"error": {"class": type(error).__name__, **content}}).pack()
            except BaseException as error:  # rank 0 waits for an answer, and some of torch's errors are no Exception
                log.exception("rank %d failed in %s", rank, name)
                role = str(message.body["arguments"].get("role", "policy"))
                answer = _untyped_answer(rank, error, role).pack()
            connection.send_multipart([call_id, *answer])


def _untyped_answer(rank: int, error: BaseException, role: str) -> Message:
    """Returns the answer that ends the trainer: an error without a class, with rank, host and traceback."""
    host, trace = socket.gethostname(), "".join(traceback.format_exception(error, limit=-8))
    message = f"rank {rank} on {host}: {type(error).__name__}: {error}{out_of_memory_hint(error, role)}"
    metadata = {"rank": str(rank), "host": host, "traceback": trace}
    return Message({"error": {"class": None, "message": message, "metadata": metadata}})
