"""Tracks which parts of the open models are released, and refuses calls that need them."""

from collections.abc import Collection, Mapping, Sequence

from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.types.v1.types_pb2 import DeviceMemory

from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.trainer.backend import Part, Role
from services.trainer.contract import role_of
from services.trainer.ranks.calls import Ranks
from services.trainer.ranks.worker import Worker

_PARTS: Mapping[int, Part] = {
    pb.MODEL_PART_OPTIMIZER: Part.OPTIMIZER,
    pb.MODEL_PART_PARAMETERS: Part.PARAMETERS,
}
Request = pb.ReleaseMemoryRequest | pb.AcquireMemoryRequest


class Released:
    """Releases and acquires parts of the models on all ranks."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._parts: set[tuple[Role, Part]] = set()

    async def release(self, request: pb.ReleaseMemoryRequest, opened: Collection[Role]) -> list[DeviceMemory]:
        """Moves parts to host memory, unless they can stay. Returns the memory of each rank."""
        roles, parts = _roles(request, opened), _parts(request)
        # First: a call that asks from now on would run after this one.
        self._parts |= {(role, part) for role in roles for part in parts}
        least = request.least_free_bytes
        answers = await self._ranks.call(Worker.release_memory, roles=roles, model_parts=parts, least_free_bytes=least)
        return [DeviceMemory.FromString(answer.frames[0]) for answer in answers]

    async def acquire(self, request: Request, opened: Collection[Role]) -> list[DeviceMemory]:
        """Moves parts back to the devices. Returns the memory of each rank.

        Raises:
            Overloaded: OUT_OF_MEMORY, a device has too little; other ranks may have moved theirs. All parts still count
                as released, and both calls may be repeated.
        """
        roles, parts = _roles(request, opened), _parts(request)
        answers = await self._ranks.call(Worker.acquire_memory, roles=roles, model_parts=parts)
        self._parts -= {(role, part) for role in roles for part in parts}
        return [DeviceMemory.FromString(answer.frames[0]) for answer in answers]

    def forget(self, role: Role | None = None) -> None:
        """Forgets what was released of a role that is opened anew, or of all."""
        self._parts = {held for held in self._parts if role not in (None, held[0])}

    def require_here(self, role: Role, *parts: Part) -> None:
        """Checks that parts of a model are on the devices.

        Raises:
            PreconditionFailed: MEMORY_RELEASED, a part is released.
        """
        for part in parts:
            if (role, part) in self._parts:
                raise PreconditionFailed(
                    f"part {part} of the {role} is released; call AcquireMemory", reason=Reason.MEMORY_RELEASED
                )


def _parts(request: Request) -> Sequence[Part]:
    if not request.parts or not all(part in _PARTS for part in request.parts):
        raise InvalidInput("parts: name optimizer, parameters or both", field="parts")
    return [_PARTS[part] for part in request.parts]


def _roles(request: Request, opened: Collection[Role]) -> Sequence[Role]:
    roles = [role_of(role) for role in request.roles] or list(opened)
    for role in roles:
        if role not in opened:
            raise InvalidInput(f"roles: no {role} is open on this trainer", field="roles")
    return roles
