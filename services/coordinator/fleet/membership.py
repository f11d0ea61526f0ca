"""Keeps a run's replicas equal to a list: the lines of a file, which is followed, or the addresses of a DNS name."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from asyncinotify import Inotify, Mask

from services.common.config.load import AnyConfig
from services.common.config.rollout import DiscoveryConfig, DnsDiscoveryConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, LockstepError, Reason, Unavailable
from services.common.tasks import backoff_s, task_group
from services.coordinator.clients.rollout import Rollout
from services.coordinator.fleet.launch import Addresses
from services.coordinator.runs.replicas import NOTES, REPLICAS, parse_replicas, write_notes, write_replicas
from services.coordinator.runs.run import Restarts, Run

log = logging.getLogger(__name__)

# Time limit for reading a list: a publication waits for it.
_READ_S = 10.0


class Source(Protocol):
    """Lists the replicas that a run should have."""

    file: Path | None
    """The file to follow, if there is one."""

    async def read(self) -> Sequence[str]:
        """Returns the addresses.

        Raises:
            OSError: They cannot be found out now.
        """
        ...


class FileSource:
    """Reads the lines of a file."""

    def __init__(self, file: Path):
        self.file: Path | None = file
        self._path = file

    async def read(self) -> Sequence[str]:
        return parse_replicas(await asyncio.to_thread(self._path.read_text))


class DnsSource:
    """Reads the IPv4 addresses of a DNS name, or its IPv6 addresses if it has no others: a host can have both."""

    file: Path | None = None

    def __init__(self, config: DnsDiscoveryConfig):
        self._name, self._port = config.name, config.port

    async def read(self) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        hosts = {str(at[0]) for family, *_, at in found if family is socket.AF_INET}
        hosts = hosts or {f"[{at[0]}]" for family, *_, at in found if family is socket.AF_INET6}
        return [f"{host}:{self._port}" for host in sorted(hosts)]


def source_of(discovery: DiscoveryConfig) -> Source:
    """Returns where `discovery` finds replicas."""
    return DnsSource(discovery) if isinstance(discovery, DnsDiscoveryConfig) else FileSource(discovery.path)


async def discovered(config: AnyConfig, given: Addresses) -> Addresses:
    """Returns `given` with the replicas that `rollout.discovery` lists; waits until there is one.

    Raises:
        InvalidInput: Addresses of replicas were given too.
        Unavailable: NO_REPLICA, none was listed within `timeouts.open_s`.
    """
    if not isinstance(config, Config) or (discovery := config.rollout.discovery) is None:
        return given
    if given.rollout:
        raise InvalidInput("give either --rollout or rollout.discovery", field="--rollout")
    source, deadline, num_retries = source_of(discovery), time.monotonic() + config.timeouts.open_s, 0
    while True:
        found, why = await read_source(source)
        if found:
            name = discovery.name if isinstance(discovery, DnsDiscoveryConfig) else ""
            return replace(given, rollout=tuple(found), rollout_name=name)
        pause_s = backoff_s(num_retries)
        if time.monotonic() + pause_s > deadline:
            raise Unavailable(f"rollout.discovery: no replica is listed: {why}", reason=Reason.NO_REPLICA)
        await asyncio.sleep(pause_s)
        num_retries += 1


@asynccontextmanager
async def following_replicas(run: Run, rollout: Rollout, restarts: Restarts) -> AsyncIterator[None]:
    """Keeps the replicas equal to the list, inside the block and before each publication.

    Without `rollout.discovery`, the list is a file in the run's directory. At first it has the addresses of `rollout`,
    with the changes of an earlier session in `restarts`. A list that is empty or cannot be read changes nothing.
    """
    config, discovery = run.config, run.config.rollout.discovery
    if config.placement == "colocated":
        yield
        return
    first = [replica.address for replica in rollout.replicas]
    kept = first if discovery else [address for address in first if address not in restarts.removed]
    write_replicas(config.run_dir, (kept + ([] if discovery else restarts.added)) or first)
    membership = Membership(rollout, source_of(discovery) if discovery else FileSource(config.run_dir / REPLICAS), run)
    rollout.before_publication, rollout.notes.changed = membership.update, membership.write_notes
    membership.write_notes()
    async with task_group() as tasks:
        following = tasks.create_task(membership.follow())
        try:
            yield
        finally:
            following.cancel()
            with suppress(OSError):  # of a disk whose failure ends the run with a better error
                (config.run_dir / REPLICAS).unlink()
                (config.run_dir / NOTES).unlink()
            restarts.added = [address for address in membership.listed if address not in first]
            restarts.removed = [address for address in first if address not in membership.listed]


class Membership:
    """Gives `rollout` the replicas that `source` lists."""

    def __init__(self, rollout: Rollout, source: Source, run: Run):
        self._rollout, self._source, self._run_dir = rollout, source, run.config.run_dir
        self._updating, self._complaint = asyncio.Lock(), ""
        self.listed: Sequence[str] = [replica.address for replica in rollout.replicas]
        """The addresses of the replicas that the run should have."""

    async def update(self) -> None:
        """Reads the list and, if it has changed, opens the new replicas and lets the others leave.

        Warns of a list that changes nothing once, until there is another one.
        """
        async with self._updating:
            found, why = await read_source(self._source)
            complaint = "" if found else f"none is listed: {why}"
            if found and set(found) != set(self.listed):
                try:
                    self._rollout.set_replicas(found)
                    self.listed = found
                except LockstepError as error:
                    complaint = error.message
                else:
                    if self._source.file != self._run_dir / REPLICAS:
                        write_replicas(self._run_dir, found)
            if complaint and complaint != self._complaint:
                log.warning("the replicas stay as they are: %s", complaint)
            self._complaint = complaint

    def write_notes(self) -> None:
        """Writes why replicas do not serve, for `lockstep replicas list`. A run goes on without it."""
        try:
            write_notes(self._run_dir, self._rollout.notes.all)
        except LockstepError as error:
            log.warning("lockstep replicas list does not show why replicas do not serve: %s", error.message)

    async def follow(self) -> None:
        """Updates whenever the file of the source is written or replaced, until it is canceled."""
        if self._source.file is None:
            return
        with Inotify() as inotify:
            try:  # the directory: a file that is replaced is another one, and Kubernetes replaces a link beside it
                inotify.add_watch(self._source.file.parent, Mask.CLOSE_WRITE | Mask.MOVED_TO)
            except OSError as error:
                log.warning("%s is read before each publication only: %s", self._source.file, error)
                return
            await self.update()  # it may have changed before it was watched
            while True:
                await inotify.get()
                await self.update()


async def read_source(source: Source) -> tuple[Sequence[str], str]:
    """Returns the addresses and, if there are none, the reason."""
    try:
        async with asyncio.timeout(_READ_S):
            found = await source.read()
    except (OSError, UnicodeDecodeError) as error:  # a timeout is an OSError without words
        return (), str(error) or f"no answer in {_READ_S:g} s"
    return found, "" if found else "the list is empty"
