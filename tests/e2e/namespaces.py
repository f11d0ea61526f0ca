"""Creates hosts that are network namespaces of this machine: each has its own interfaces, loopback and ports."""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Host:
    """Holds the name of a namespace, and its address on the network between the hosts."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Returns the command line that runs `command` on this host."""
        return ["ip", "netns", "exec", self.name, *command]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Creates two hosts at the ends of a veth pair. Skips the test where namespaces may not be created."""
    if not shutil.which("ip"):
        pytest.skip("network namespaces need iproute2: apt-get install iproute2")
    prefix = f"ls{os.getpid()}n{next(_numbers)}"
    first, second = Host(f"{prefix}a", "10.177.0.1"), Host(f"{prefix}b", "10.177.0.2")
    made = subprocess.run(["ip", "netns", "add", first.name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    with contextlib.ExitStack() as stack:
        stack.callback(_ip, "netns", "delete", first.name)
        _ip("netns", "add", second.name)
        stack.callback(_ip, "netns", "delete", second.name)
        _ip("link", "add", "veth0", "netns", first.name, "type", "veth", "peer", "name", "veth0", "netns", second.name)
        for host in (first, second):
            for arguments in (
                ("address", "add", f"{host.address}/24", "dev", "veth0"),
                ("link", "set", "veth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-netns", host.name, *arguments)
        yield first, second


def received_bytes(host: Host) -> int:
    """Returns the number of bytes that `host` has received over the network between the hosts so far."""
    counter = Path("/sys/class/net/veth0/statistics/rx_bytes")  # of the namespace that reads it
    return int(subprocess.check_output(host.command("cat", str(counter)), text=True))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
