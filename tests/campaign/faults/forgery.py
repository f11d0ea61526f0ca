"""Messages of a stranger on the port where the trainer's ranks meet: bytes, another rank's answers, another key."""

import contextlib
import json
import socket
from collections.abc import Iterator

import psutil
import zmq

from tests.campaign.faults.base import Fault, Scene

_FOR_S, _ANSWER_S, _NUM_FORGED = 2.0, 0.5, 20
# The first ten bytes of every ZeroMQ connection (rfc.zeromq.org/spec/23).
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"
_GREETING = _SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


async def _bytes(scene: Scene, victim: str) -> None:
    for address in _addresses(scene):
        for begin in (b"", _SIGNATURE, _GREETING):
            with contextlib.suppress(OSError), socket.create_connection(address, _ANSWER_S) as connection:
                connection.sendall(begin + scene.number.randbytes(1 << 16))


async def _as_rank(scene: Scene, victim: str) -> None:
    _send(scene, has_key=False)


async def _other_key(scene: Scene, victim: str) -> None:
    _send(scene, has_key=True)


def _send(scene: Scene, *, has_key: bool) -> None:
    """Sends greetings, answers and an end in the name of rank 1; without a key, or with a key that is not rank 0's."""
    for host, port in _addresses(scene):
        forger = zmq.Context.instance().socket(zmq.DEALER)
        forger.setsockopt(zmq.IDENTITY, b"1")
        forger.setsockopt(zmq.LINGER, 0)
        if has_key:
            forger.curve_publickey, forger.curve_secretkey = zmq.curve_keypair()
            forger.curve_serverkey = zmq.curve_keypair()[0]
        forger.connect(f"tcp://{host}:{port}")
        calls = [f"call {number}".encode() for number in range(_NUM_FORGED)]
        with contextlib.suppress(zmq.Again):  # once rank 0 has refused the forger, nothing can be sent
            for call in (*calls, b"end"):
                forger.send_multipart([call, json.dumps({"metrics": {}}).encode()], flags=zmq.NOBLOCK)
        scene.undos.append((_FOR_S, forger.close))


def _addresses(scene: Scene) -> Iterator[tuple[str, int]]:
    """Yields the addresses of rank 0 at which ZeroMQ answers."""
    pid = scene.pid_of("trainer")
    if pid is None:
        return
    for connection in psutil.Process(pid).net_connections("tcp"):
        address = (connection.laddr.ip, connection.laddr.port)
        if connection.status == psutil.CONN_LISTEN and _greets(address):
            yield address


def _greets(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, _ANSWER_S) as connection:
        connection.settimeout(_ANSWER_S)
        return connection.recv(1) == _SIGNATURE[:1]
    return False


FAULTS = (
    Fault("forged-bytes", ("ranks",), _bytes),
    Fault("forged-answers", ("ranks",), _as_rank),
    Fault("forged-key", ("ranks",), _other_key),
)
