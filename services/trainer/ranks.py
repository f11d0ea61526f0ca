"""Rank 0 hands every command to all ranks, each with its own part, and waits for all of them.

JSON for the command, Arrow frames for samples, over ZeroMQ: nothing is pickled. A rank that raises says so with its
traceback even while others wait for it in a collective; those are then ended with the process group's processes.
"""

import asyncio
import json
import logging
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from services.common.errors import ERROR_CLASSES, InternalError, LockstepError, Reason

log = logging.getLogger(__name__)

# After one rank failed with a typed error, the others are about to, unless they wait for it in a collective.
_OTHERS_GRACE_S = 10.0


Phase = Callable[[str, str], AbstractContextManager[None]]
"""Entered while all ranks do something: method and role."""


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


class Ranks:
    """Rank 0's side. Commands run one after the other."""

    def __init__(
        self, num_ranks: int, host: str, on_failure: Callable[[str], None], phase: Phase = lambda *_: nullcontext()
    ):
        self.num_ranks, self._phase = num_ranks, phase
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._on_failure = on_failure
        self._turn = asyncio.Lock()
        self._failure = ""

    async def wait_for_all(self) -> None:
        """Returns once every rank has connected."""
        missing = set(range(self.num_ranks))
        while missing:
            sender, *_ = await self._socket.recv_multipart()
            missing.discard(int(sender))

    async def call(self, method: str, parts: Sequence[Message] | None = None, **arguments: Any) -> list[Message]:
        """Runs `method` on all ranks with `arguments` and each rank's own part; the answers in rank order.

        A cancelled call goes on in the background: the ranks cannot be called back, and the next call waits for them.

        Raises:
            LockstepError: As a rank raised it, when all ranks have answered.
            InternalError: A rank failed with anything else; the trainer ends.
        """
        return await asyncio.shield(self._call(method, parts or [Message({})] * self.num_ranks, arguments))

    async def _call(self, method: str, parts: Sequence[Message], arguments: dict[str, Any]) -> list[Message]:
        async with self._turn:
            if self._failure:
                raise InternalError(self._failure, reason=Reason.RANK_FAILED)
            with self._phase(method, arguments.get("role", "policy")):
                for rank, part in enumerate(parts):
                    command = Message({"method": method, "arguments": arguments | part.body}, part.frames)
                    await self._socket.send_multipart([str(rank).encode(), *command.pack()])
                answers = await self._answers(method)
        errors = [answer.body["error"] for _, answer in sorted(answers.items()) if "error" in answer.body]
        if errors:
            raise _rebuild(errors[0])
        return [answers[rank] for rank in range(self.num_ranks)]

    async def _answers(self, method: str) -> dict[int, Message]:
        answers: dict[int, Message] = {}
        grace_s: float | None = None
        while len(answers) < self.num_ranks:
            try:
                async with asyncio.timeout(grace_s):
                    sender, *parts = await self._socket.recv_multipart()
            except TimeoutError:
                self._fail(f"{method}: ranks {sorted(set(range(self.num_ranks)) - set(answers))} did not answer", {})
            answer = answers[int(sender)] = Message.unpack(parts)
            if "error" in answer.body:
                grace_s = _OTHERS_GRACE_S
                if answer.body["error"]["class"] is None:
                    self._fail(f"{method}: {answer.body['error']['message']}", answer.body["error"]["metadata"])
        return answers

    def _fail(self, message: str, metadata: dict[str, str]) -> None:
        self._failure = message
        self._on_failure(message)
        raise InternalError(message, reason=Reason.RANK_FAILED, **metadata)


def follow(rank: int, address: str, worker: Any) -> None:
    """Every rank's side: runs the commands on `worker`, one method each, until the process ends.

    A method takes its arguments by keyword, and `frames` if it wants them; it returns a Message or None.
    """
    connection = zmq.Context.instance().socket(zmq.DEALER)
    connection.setsockopt(zmq.IDENTITY, str(rank).encode())
    connection.setsockopt(zmq.LINGER, 1000)
    connection.connect(address)
    connection.send(b"{}")
    while True:
        command = Message.unpack(connection.recv_multipart())
        connection.send_multipart(_run(rank, worker, command).pack())


def _run(rank: int, worker: Any, command: Message) -> Message:
    method, arguments = getattr(worker, command.body["method"]), command.body["arguments"]
    try:
        result = method(**arguments, frames=command.frames) if command.frames else method(**arguments)
        return result or Message({})
    except LockstepError as error:
        return Message({"error": _describe(error, type(error).__name__)})
    except Exception as error:
        log.exception("rank %d failed in %s", rank, command.body["method"])
        where = {"rank": str(rank), "host": socket.gethostname(), "traceback": traceback.format_exc(limit=-8)}
        message = f"rank {rank} on {where['host']}: {type(error).__name__}: {error}"
        return Message({"error": {"class": None, "reason": None, "message": message, "metadata": where}})


def _describe(error: LockstepError, name: str) -> dict[str, Any]:
    return {"class": name, "reason": error.reason.value, "message": error.message, "metadata": error.metadata}


def _rebuild(error: dict[str, Any]) -> LockstepError:
    cls = next(cls for cls in ERROR_CLASSES if cls.__name__ == error["class"])
    return cls(error["message"], reason=Reason(error["reason"]), **error["metadata"])
