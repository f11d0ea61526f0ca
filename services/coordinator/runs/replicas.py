"""Keeps the list of replicas that a run should have: a file in its directory with an address on each line.

`lockstep replicas` changes the file, directly or through a daemon, and the coordinator follows it.
"""

import fcntl
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.config.run import Config
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.files.storage import writing
from services.common.rpc.address import parse_address
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.recorded import RecordedLedger, is_running

REPLICAS = "replicas"


@dataclass(frozen=True)
class ListedReplica:
    """Describes a replica of a run."""

    address: str
    version: int | None
    """The version that it serves; None if it did not take part in the newest publication."""
    is_wanted: bool
    """Whether it takes part in the next publication, if it can."""

    @property
    def state(self) -> str:
        """Returns serving, joining or leaving."""
        if not self.is_wanted:
            return "leaving"
        return "joining" if self.version is None else "serving"


def parse_replicas(text: str) -> list[str]:
    """Returns the addresses in `text`: one on each line; # begins a comment."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))


def write_replicas(run_dir: Path, addresses: Sequence[str]) -> None:
    """Replaces the file.

    Raises:
        PreconditionFailed: STORAGE_FAILED: the disk is full or read-only, or the directory is gone.
    """
    path = run_dir / REPLICAS
    with writing(path):
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{address}\n" for address in addresses))
        partial.rename(path)


def change_replicas(run_dir: Path, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[ListedReplica]:
    """Adds and removes addresses, and returns all replicas then.

    Raises:
        InvalidInput: An address is malformed or is no replica of the run, or none would be left.
        PreconditionFailed: The run is not in progress, or its replicas are not changed in this way.
    """
    for address in add:
        parse_address(address, field="address")
    _require_changeable(run_dir)
    with _locked(run_dir):
        wanted = _wanted(run_dir)
        if unknown := [address for address in remove if address not in wanted]:
            raise InvalidInput(f"{', '.join(unknown)}: the run has {', '.join(wanted)}", field="address")
        left = [address for address in dict.fromkeys([*wanted, *add]) if address not in remove]
        if not left:
            raise InvalidInput("a run needs a replica: add another one before you remove the last", field="address")
        write_replicas(run_dir, left)
    return listed_replicas(run_dir)


def listed_replicas(run_dir: Path) -> list[ListedReplica]:
    """Returns the replicas of a run in progress: those that served its newest weights, then those that join.

    Raises:
        PreconditionFailed: The run is not in progress.
    """
    _require_running(run_dir)
    with closing(RecordedLedger(run_dir)) as ledger:
        has_published = ledger.is_newer(Kind.PUBLISHED, Kind.OPENED)
        published = (ledger.last(Kind.PUBLISHED) if has_published else None) or {"version": None, "received": {}}
    served: Collection[str] = published["received"]
    wanted = _wanted(run_dir)
    there = [ListedReplica(address, published["version"], address in wanted) for address in served]
    return there + [ListedReplica(address, None, True) for address in wanted if address not in served]


def _wanted(run_dir: Path) -> list[str]:
    path = run_dir / REPLICAS
    return parse_replicas(path.read_text()) if path.is_file() else []


def _require_running(run_dir: Path) -> None:
    if not is_running(run_dir) or not (run_dir / REPLICAS).is_file():
        raise PreconditionFailed(
            f"{run_dir} has no run in progress with open services, so it has no replicas; name them with --rollout, or "
            "rollout.discovery, when you start it",
            reason=Reason.WRONG_STATE,
        )


def _require_changeable(run_dir: Path) -> None:
    _require_running(run_dir)
    config = Config.model_validate_json((run_dir / "config.json").read_text())
    if config.rollout.discovery is not None:
        place = config.rollout.discovery
        where = place.path if place.kind == "file" else f"the DNS name {place.name}"
        raise PreconditionFailed(f"the replicas of this run are those in {where} (rollout.discovery): change that")
    if config.placement == "colocated":
        raise PreconditionFailed("the replicas of a colocated run share the trainer's GPUs and cannot change")


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Keeps other processes from changing the file in the block."""
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
