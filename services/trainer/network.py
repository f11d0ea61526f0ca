"""Which way this host reaches the others, for libraries that would guess."""

import ipaddress
import os
import socket

import psutil

from services.common.errors import InvalidInput


def use_interface_to(host: str) -> None:
    """Makes gloo talk through the interface that reaches `host`, unless GLOO_SOCKET_IFNAME says otherwise.

    gloo would take the address that this host's own name resolves to, which on many hosts is loopback.

    Raises:
        InvalidInput: No interface has the address that the kernel would use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent: this only picks a route
        address = probe.getsockname()[0]
    names = [name for name, found in psutil.net_if_addrs().items() if address in [entry.address for entry in found]]
    if not names:
        raise InvalidInput(
            f"no interface of this host has {address}, from which {host} is reached", field="master-addr"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def published_host(host: str) -> str:
    """What to tell others of the address that a service listens on: nothing if that is every interface."""
    try:
        return "" if ipaddress.ip_address(host.strip("[]")).is_unspecified else host
    except ValueError:
        return host  # a name
