"""Opens the ZeroMQ sockets between rank 0 and all ranks. Only a process that knows rank 0's key can connect.

The connections use CurveZMQ (rfc.zeromq.org/spec/26), which encrypts and authenticates. A client needs the server's
public key for its first message, and that key is never sent in the clear. Rank 0 makes a new key pair at each start and
gives the public key only to its ranks, so that the key serves as their secret.
"""

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import zmq
import zmq.asyncio

from services.common.errors import InvalidInput
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


@contextlib.contextmanager
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
