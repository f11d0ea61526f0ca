"""Parses addresses, and refuses plaintext beyond loopback."""

import contextlib
import ipaddress
import socket

from services.common.errors import InvalidInput
from services.common.rpc.security.tls import Transport


def parse_address(address: str, *, field: str) -> tuple[str, int]:
    """Splits `host:port`.

    Raises:
        InvalidInput: `address` does not have that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"{field}: {address!r} is not HOST:PORT", field=field)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Returns whether `host` is a loopback address, which only this host can have."""
    with contextlib.suppress(ValueError, OSError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False


def require_loopback(
    host: str,
    *,
    insecure: bool,
    field: str = "--listen",
    consent: str = "pass --tls with a certificate, or --insecure",
) -> None:
    """Refuses a plaintext listener that other hosts can reach, unless `insecure` allows it.

    Raises:
        InvalidInput: `host` is not a loopback address and `insecure` is false.
    """
    if not insecure and not is_loopback(host):
        raise InvalidInput(
            f"{field} {host}: plaintext is only served on loopback; {consent} on a network that you trust",
            field=field.removeprefix("--"),
        )


def require_secure(address: str, transport: Transport, *, field: str) -> None:
    """Refuses to call `address` in plaintext over a network, unless `transport` allows it.

    Raises:
        InvalidInput: `transport` does not allow it, or `address` is malformed.
    """
    host, _ = parse_address(address, field=field)
    if transport.tls is None and not transport.insecure and not is_loopback(host):
        raise InvalidInput(
            f"{field}: {address} is not on this host, and plaintext is only used on loopback; pass --tls with a "
            "certificate, or --insecure on a network that you trust",
            field=field,
        )
