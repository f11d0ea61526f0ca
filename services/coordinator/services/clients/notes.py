"""Keeps why replicas that a run should have do not serve, for `lockstep replicas list`."""

from collections.abc import Callable, Collection, Mapping, Sequence

from services.common.errors import LockstepError, Reason
from services.coordinator.runs.replicas import Note
from services.coordinator.services.clients.replica import Replica, ReplicaState


class Notes:
    """Has a note for each address whose replica does not serve, and says when they change."""

    def __init__(self) -> None:
        self.all: Mapping[str, Note] = {}
        """The notes by address."""
        self.changed: Callable[[], None] = lambda: None
        """Is called after every change."""

    def is_unused(self, address: str) -> bool:
        """Returns whether the run does without the service at `address`."""
        return address in self.all and self.all[address].is_unused

    def used_names(self, addresses: Collection[str]) -> set[str]:
        """Returns the addresses by which the run knows the services at `addresses`."""
        return {(self.all[at].same_as if at in self.all else "") or at for at in addresses}

    def put(self, address: str, note: Note | None) -> bool:
        """Replaces the note of an address, or removes it. Returns whether that changes it."""
        if self.all.get(address) == note:
            return False
        others = {at: other for at, other in self.all.items() if at != address}
        self.all = {**others, address: note} if note else others
        self.changed()
        return True

    def keep_only(self, addresses: Collection[str]) -> None:
        """Forgets the notes of addresses that are not listed any more, so that they can be tried again."""
        for address in set(self.all).difference(addresses):
            self.put(address, None)


def why_not_open(error: LockstepError) -> str:
    """Returns why a replica is not open, in a few words."""
    if error.reason is not Reason.UNREACHABLE:
        return error.message
    # gRPC: failed to connect to all addresses; last error: UNKNOWN: ipv4:...: Failed to connect ...: Connection refused
    return f"unreachable: {error.message.rpartition(': ')[2].partition(' (')[0].lower()}"


def same_services(replicas: Sequence[Replica]) -> dict[Replica, Replica]:
    """Returns every replica that is another name of one that the run uses, with that one."""
    living = [replica for replica in replicas if replica.state is not ReplicaState.DEAD and replica.incarnation]
    used, found = dict[str, Replica](), dict[Replica, Replica]()
    for replica in sorted(living, key=lambda one: one.state is not ReplicaState.SERVING):
        first = used.setdefault(replica.incarnation, replica)
        if first is not replica:
            found[replica] = first
    return found
