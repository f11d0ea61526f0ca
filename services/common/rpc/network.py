"""Finds the route from this host to another."""

import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Route:
    """Holds the local address from which another host is reached, and its interface (empty if none has the address)."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} {self.address}".strip()


def route_to(host: str) -> Route:
    """Returns the route by which the kernel would reach `host`. Sends nothing.

    Raises:
        OSError: The name is unknown, or there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # picks a route without sending a packet
        address = probe.getsockname()[0]
    names = [name for name, found in psutil.net_if_addrs().items() if address in [entry.address for entry in found]]
    return Route(names[0] if names else "", address)
