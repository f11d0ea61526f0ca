"""Reserves ports for services that are about to be started."""

import contextlib
import errno
import random
import socket

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
