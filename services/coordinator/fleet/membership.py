"""Keeps a run's replicas equal to a list: the lines of a file, which is followed, or the addresses of a DNS name."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from asyncinotify import Inotify, Mask

from services.common.config.load import AnyConfig
from services.common.config.rollout import DiscoveryConfig, DnsDiscoveryConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, LockstepError, Reason, Unavailable
from services.common.rpc.address import parse_address
from services.common.tasks import backoff_s, task_group
from services.coordinator.clients.rollout import Rollout
from services.coordinator.fleet.launch import Addresses
from services.coordinator.runs.replicas import NOTES, REPLICAS, parse_replicas, write_notes, write_replicas
from services.coordinator.runs.run import Restarts, Run

log = logging.getLogger(__name__)

# Time limit for reading a list: a publication waits for it.
_READ_S = 10.0


Source = Path | DnsDiscoveryConfig
"""Lists the replicas that a run should have: a file with an address on each line, or a DNS name."""


def source_of(discovery: DiscoveryConfig) -> Source:
    """Returns where `discovery` finds replicas."""
    return discovery if isinstance(discovery, DnsDiscoveryConfig) else discovery.path


async def _read_now(source: Source) -> Sequence[str]:
    if isinstance(source, Path):
        return parse_replicas(await asyncio.to_thread(source.read_text))
    loop = asyncio.get_running_loop()
    resolved = await loop.getaddrinfo(source.name, source.port, type=socket.SOCK_STREAM)
    # IPv6 only if there are no others: a host can have both, and would be two replicas.
    hosts = {str(at[0]) for family, *_, at in resolved if family is socket.AF_INET}
    hosts = hosts or {f"[{at[0]}]" for family, *_, at in resolved if family is socket.AF_INET6}
    return [f"{host}:{source.port}" for host in sorted(hosts)]


async def discovered(config: AnyConfig, addresses: Addresses) -> Addresses:
    """Returns `addresses` with the replicas that `rollout.discovery` lists; waits until there is one.

    Raises:
        InvalidInput: Addresses of replicas were given too, or one that is listed is malformed.
        Unavailable: NO_REPLICA, none was listed within `timeouts.open_s`.
    """
    if not isinstance(config, Config) or (discovery := config.rollout.discovery) is None:
        return addresses
    if addresses.rollout:
        raise InvalidInput("give either --rollout or rollout.discovery", field="--rollout")
    name = discovery.name if isinstance(discovery, DnsDiscoveryConfig) else ""
    deadline_s, num_retries = time.monotonic() + config.timeouts.open_s, 0
    while True:
        replicas, why = await read_source(source_of(discovery))
        for address in replicas:
            parse_address(address, field="rollout.discovery")
        if replicas:
            return replace(addresses, rollout=tuple(replicas), rollout_name=name)
        if time.monotonic() + (pause_s := backoff_s(num_retries)) > deadline_s:
            raise Unavailable(f"rollout.discovery: no replica is listed: {why}", reason=Reason.NO_REPLICA)
        if num_retries == 0:
            log.warning("no replica is listed yet, waiting up to %g s: %s", config.timeouts.open_s, why)
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
    listed = first
    if not discovery:
        listed = [address for address in first if address not in restarts.removed] + restarts.added
    write_replicas(config.run_dir, listed or first)
    membership = Membership(rollout, source_of(discovery) if discovery else config.run_dir / REPLICAS, run)
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

    async def update(self) -> None:
        """Reads the list and, if it has changed, opens the new replicas and lets the others leave.

        Warns of a list that changes nothing once, until there is another one.
        """
        async with self._updating:
            replicas, why = await read_source(self._source)
            complaint = "" if replicas else f"none is listed: {why}"
            if replicas and set(replicas) != set(self.listed):
                try:
                    self._rollout.set_replicas(replicas)
                    self.listed = replicas
                except LockstepError as error:
                    complaint = error.message
                else:
                    if self._source != self._run_dir / REPLICAS:
                        write_replicas(self._run_dir, replicas)
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
        if not isinstance(self._source, Path):
            return
        with Inotify() as inotify:
            try:  # the directory: a file that is replaced is another one, and Kubernetes replaces a link beside it
                inotify.add_watch(self._source.parent, Mask.CLOSE_WRITE | Mask.MOVED_TO)
            except OSError as error:
                log.warning("%s is read before each publication only: %s", self._source, error)
                return
            await self.update()  # it may have changed before it was watched
            while True:
                await inotify.get()
                await self.update()


async def read_source(source: Source) -> tuple[Sequence[str], str]:
    """Returns the addresses and, if there are none, the reason, which names the source."""
    where = source if isinstance(source, Path) else f"the DNS name {source.name}"
    try:
        async with asyncio.timeout(_READ_S):
            replicas = await _read_now(source)
    except (OSError, UnicodeDecodeError) as error:  # a timeout is an OSError without words
        why = getattr(error, "strerror", None) or str(error) or f"no answer in {_READ_S:g} s"
        return (), f"{where}: {why}"
    return replicas, "" if replicas else f"{where}: the list is empty"
