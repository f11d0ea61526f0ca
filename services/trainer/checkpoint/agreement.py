"""Raises an error of one rank on every rank, so that none waits for the others in a collective."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from services.common.errors import InvalidInput, Reason

# JSON needs at most 6 bytes for a character.
_MAX_CHARACTERS, _MAX_BYTES = 2000, 16384


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Runs a block that has no collectives. If ranks refuse their input in it, the lowest one's error rises on all.

    Ranks on other hosts, or only rank 0, read files that the others do not see. Every rank must enter the block.

    Raises:
        InvalidInput: The block raised it on this rank or on another.
    """
    refusal: InvalidInput | None = None
    try:
        yield
    except InvalidInput as error:
        refusal = error
    first = _first(refusal)
    if refusal is not None:
        raise refusal
    if first is not None:
        raise first


def _first(refusal: InvalidInput | None) -> InvalidInput | None:
    content = b""
    if refusal is not None:
        about = (refusal.reason.value, refusal.metadata.get("field", "")[:100])
        content = json.dumps([refusal.message[:_MAX_CHARACTERS], *about]).encode()
    own = torch.tensor(list(content.ljust(_MAX_BYTES)), dtype=torch.uint8)
    everyones = torch.empty(dist.get_world_size() * _MAX_BYTES, dtype=torch.uint8)
    dist.all_gather_into_tensor(everyones, own)  # over gloo, which every process group of a trainer has
    for row in everyones.view(-1, _MAX_BYTES).numpy():
        if text := row.tobytes().strip():
            message, reason, field = json.loads(text)
            return InvalidInput(message, reason=Reason(reason), field=field)
    return None
