"""Ports for services that are about to be started."""

import contextlib
import errno
import random
import socket

# Below what Linux gives to outgoing connections (net.ipv4.ip_local_port_range, from 32768): such a port could be taken
# by any connection before its service, which may need a minute to start, listens on it.
PORTS = range(20000, 32768)


def hold_free_port(host: str, holders: contextlib.ExitStack) -> int:
    """A port of `host` that is free, and that nobody else can choose until `holders` is closed.

    Raises:
        OSError: `host` is not this one, or no port is free.
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
