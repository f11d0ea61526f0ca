"""Which way this host reaches the others, for libraries that would guess."""

import ipaddress
import os

from services.common.errors import InvalidInput
from services.common.rpc.network import route_to


def use_interface_to(host: str) -> None:
    """Makes gloo talk through the interface that reaches `host`, unless GLOO_SOCKET_IFNAME says otherwise.

    gloo would take the address that this host's own name resolves to, which on many hosts is loopback.

    Raises:
        InvalidInput: No interface has the address that the kernel would use.
    """
    route = route_to(host)
    if not route.interface:
        raise InvalidInput(
            f"no interface of this host has {route.address}, from which {host} is reached", field="master-addr"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", route.interface)


def published_host(host: str) -> str:
    """What to tell others of the address that a service listens on: nothing if that is every interface."""
    try:
        return "" if ipaddress.ip_address(host.strip("[]")).is_unspecified else host
    except ValueError:
        return host  # a name
