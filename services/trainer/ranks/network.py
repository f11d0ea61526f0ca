"""Finds the network interface to other hosts, for libraries that would otherwise guess it."""

import ipaddress
import os

from services.common.errors import InvalidInput
from services.common.rpc.network import route_to


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
