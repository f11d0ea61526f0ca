"""Parses addresses, refuses plaintext beyond loopback, and finds free ports and the interface that reaches a host."""

import contextlib
import errno
import ipaddress
import random
import socket
from dataclasses import dataclass

from services.common.errors import InvalidInput
from services.common.rpc.tls import Transport, is_address


def parse_address(address: str, *, field: str) -> tuple[str, int]:
    """Splits `host:port`. An IPv6 address as the host is in brackets."""
    host, _, port = address.rpartition(":")
    if ":" in host and is_address(host):
        raise InvalidInput(f"{field}: {address!r} is not HOST:PORT; write an IPv6 address in brackets", field=field)
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"{field}: {address!r} is not HOST:PORT", field=field)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Returns whether `host` is a loopback address, which only this host can have."""
    with contextlib.suppress(ValueError, OSError):
        address = host.strip("[]") if host.startswith("[") else socket.gethostbyname(host)
        return ipaddress.ip_address(address).is_loopback
    return False


def require_loopback(
    host: str, *, insecure: bool, field: str = "--listen", consent: str = "pass --tls with a certificate, or --insecure"
) -> None:
    """Refuses a plaintext listener that other hosts can reach, unless `insecure` allows it."""
    if not insecure and not is_loopback(host):
        raise InvalidInput(
            f"{field} {host}: plaintext is only served on loopback; {consent} on a network that you trust",
            field=field.removeprefix("--"),
        )


def require_secure(address: str, transport: Transport, *, field: str) -> None:
    """Refuses to call `address` in plaintext over a network, unless `transport` allows it."""
    host, _ = parse_address(address, field=field)
    if transport.tls is None and not transport.insecure and not is_loopback(host):
        raise InvalidInput(
            f"{field}: {address} is not on this host, and plaintext is only used on loopback; pass --tls with a "
            "certificate, or --insecure on a network that you trust",
            field=field,
        )


@dataclass(frozen=True)
class Route:
    """The local address from which another host is reached, and its interface (empty if none has the address)."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} {self.address}".strip()


def route_to(host: str) -> Route:
    """Returns the route by which the kernel would reach `host`. Sends nothing.

    Raises:
        OSError: The name is unknown, or there is no route.
    """
    import psutil  # only trainer and rollout have it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # picks a route without sending a packet
        address = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    names = (name for name, entries in interfaces if address in [entry.address for entry in entries])
    return Route(next(names, ""), address)


# Below the range that Linux uses for outgoing connections (net.ipv4.ip_local_port_range, from 32768). A port in that
# range could be taken by any connection before its service listens, which may take a minute.
PORTS = range(20000, 32768)


def hold_free_port(host: str, holders: contextlib.ExitStack) -> int:
    """Returns a free port of `host` and reserves it until `holders` is closed.

    Raises:
        OSError: `host` is not an address of this host, or no port is free.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        holder = socket.socket()
        try:
            holder.bind((host, port))
        except OSError as error:
            holder.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            holders.enter_context(holder)
            return port
    raise OSError(errno.EADDRINUSE, f"no port of {host} from {PORTS.start} to {PORTS.stop - 1} is free")
