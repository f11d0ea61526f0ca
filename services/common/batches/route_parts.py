"""Sends the routes of a prompt group in parts that fit into messages, and each prompt's routes only once.

The samples of a prompt share it, and mostly its routes too, which the engine's prefix cache keeps.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from lockstep.rollout.v1.rollout_pb2 import Routes

from services.common.errors import InternalError

# Messages of this size do not block the event loop for long.
PART_BYTES = 1 << 20


def to_parts(routes: Sequence[bytes], *, part_bytes: int = PART_BYTES) -> Iterator[Routes]:
    """Yields the routes of a group's completions in parts, without bytes at the start that equal the first one's."""
    for index, data in enumerate(routes):
        num_shared = _num_shared(routes[0], data) if index else 0
        own = data[num_shared:]
        for begin in range(0, max(1, len(own)), part_bytes):
            yield Routes(
                completion=index, num_shared_bytes=0 if begin else num_shared, data=own[begin : begin + part_bytes]
            )


def from_parts(parts: Iterable[Routes], num_completions: int) -> list[bytes]:
    """Returns the routes of each completion; an empty list if there are no parts.

    Raises:
        InternalError: A completion has none, or the parts are out of order.
    """
    found: list[bytearray] = []
    for part in parts:
        if part.completion == len(found):
            found.append(bytearray(found[0][: part.num_shared_bytes] if found else b""))
        elif part.completion != len(found) - 1:
            raise InternalError(f"routes of completion {part.completion} came after those of {len(found)} completions")
        found[-1] += part.data
    if found and len(found) != num_completions:
        raise InternalError(f"{len(found)} of {num_completions} completions came with routes")
    return [bytes(data) for data in found]


def _num_shared(first: bytes, other: bytes) -> int:
    """Returns how many bytes are equal at the start of both."""
    size = min(len(first), len(other))
    differs = np.frombuffer(first, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differs.argmax()) if differs.any() else size
