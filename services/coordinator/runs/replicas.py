"""The list of replicas that a run should have: a file in its directory with an address on each line.

`lockstep replicas` changes the file, directly or through a daemon, and the coordinator follows it.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.common.config.run import Config
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.files import write_whole
from services.common.rpc.address import parse_address
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reader import LedgerReader, is_running

REPLICAS = "replicas"
NOTES = "replicas.notes"


@dataclass(frozen=True)
class Note:
    """Why a replica that the run should have does not serve."""

    why: str
    is_unused: bool = False
    """Whether the run does without it, until its address is removed from the list and added again."""
    same_as: str = ""
    """The address by which the run uses the same service, if it does."""


def replica_state(replica: pb.Replica) -> str:
    if replica.is_unused:
        return "unused"
    if not replica.is_wanted:
        return "leaving"
    return "serving" if replica.HasField("version") else "joining"


def parse_replicas(text: str) -> list[str]:
    """Returns the addresses in `text`: one on each line; # begins a comment."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))


def write_replicas(run_dir: Path, addresses: Sequence[str]) -> None:
    write_whole(run_dir / REPLICAS, "".join(f"{address}\n" for address in addresses))


def write_notes(run_dir: Path, notes: Mapping[str, Note]) -> None:
    """Replaces the file that says why replicas do not serve. Raises as `write_replicas` does."""
    write_whole(run_dir / NOTES, json.dumps({address: asdict(note) for address, note in notes.items()}))


def read_notes(run_dir: Path) -> dict[str, Note]:
    path = run_dir / NOTES
    return {at: Note(**note) for at, note in json.loads(path.read_text()).items()} if path.is_file() else {}


def change_replicas(run_dir: Path, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[pb.Replica]:
    """Adds and removes addresses, and returns all replicas then.

    Raises:
        InvalidInput: An address is malformed or is no replica of the run, or none would be left.
        PreconditionFailed: The run is not in progress, or its replicas are not changed in this way.
    """
    for address in add:
        parse_address(address, field="address")
    _require_changeable(run_dir)
    with _locked(run_dir):
        wanted = _wanted_addresses(run_dir)
        if unknown := [address for address in remove if address not in wanted]:
            raise InvalidInput(f"{', '.join(unknown)}: the run has {', '.join(wanted)}", field="address")
        left = [address for address in dict.fromkeys([*wanted, *add]) if address not in remove]
        if not left:
            raise InvalidInput("a run needs a replica: add another one before you remove the last", field="address")
        write_replicas(run_dir, left)
    return listed_replicas(run_dir)


def listed_replicas(run_dir: Path) -> list[pb.Replica]:
    """Returns the replicas of a run in progress: those that served its newest weights, then those that join."""
    _require_running(run_dir)
    version, served = _published(run_dir)
    wanted, notes = _wanted_addresses(run_dir), read_notes(run_dir)
    stay = {*wanted, *(notes[address].same_as for address in wanted if address in notes)}
    joining = [address for address in wanted if address not in served]
    none = Note("")
    return [
        pb.Replica(
            address=address,
            version=version if address in served else None,
            is_wanted=address in stay,
            note=notes.get(address, none).why,
            is_unused=notes.get(address, none).is_unused,
        )
        for address in (*served, *joining)
    ]


def _published(run_dir: Path) -> tuple[int | None, list[str]]:
    with closing(LedgerReader(run_dir)) as ledger:
        published = ledger.last(Kind.PUBLISHED) if ledger.is_newer(Kind.PUBLISHED, Kind.OPENED) else None
    return (published["version"], list(published["received"])) if published else (None, [])


def _wanted_addresses(run_dir: Path) -> list[str]:
    """Returns the list, or the replicas that serve if it changes nothing: it is empty or has a malformed address."""
    path = run_dir / REPLICAS
    listed = parse_replicas(path.read_text()) if path.is_file() else []
    try:
        for address in listed:
            parse_address(address, field="address")
    except InvalidInput:
        listed = []
    return listed or _published(run_dir)[1]


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
        source = config.rollout.discovery
        where = source.path if source.kind == "file" else f"the DNS name {source.name}"
        raise PreconditionFailed(f"the replicas of this run are those in {where} (rollout.discovery): change that")
    if config.placement == "colocated":
        raise PreconditionFailed("the replicas of a colocated run share the trainer's GPUs and cannot change")


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
