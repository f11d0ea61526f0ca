"""Which way this host reaches another."""

import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Route:
    """The address from which this host reaches another, and its interface; empty if none has that address."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} {self.address}".strip()


def route_to(host: str) -> Route:
    """How the kernel would reach `host`. Sends nothing.

    Raises:
        OSError: The name is not known, or no way leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent: this only picks a route
        address = probe.getsockname()[0]
    names = [name for name, found in psutil.net_if_addrs().items() if address in [entry.address for entry in found]]
    return Route(names[0] if names else "", address)
