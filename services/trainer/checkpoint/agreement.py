"""Tells every rank what the others have: any JSON value, or the error of one of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from services.common.errors import InvalidInput, Reason


def gather_json(value: object, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's `value`, which is JSON data, in rank order."""
    # A bytearray, because torch warns of memory that it may not write to.
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(padded, torch.cat([own, own.new_zeros(longest - own.numel())]), group=group)
    return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in zip(padded, sizes, strict=True)]


def names_on_all_ranks(
    metrics: Sequence[Mapping[str, torch.Tensor]], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[str]:
    """Returns the names of the metrics of any micro-batch on any rank, in the same order on all ranks.

    A user's loss may return other metrics for each micro-batch. One that is not there counts as 0.
    """
    own = sorted({name for one in metrics for name in one})
    return sorted({name for names in gather_json(own, device, group) for name in names})


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Runs a block that has no collectives. If ranks raise InvalidInput in it, the lowest one's rises on the others.

    Ranks on other hosts, or only rank 0, read files that the others do not see, and would wait in the next collective
    for a rank that has raised. Every rank must enter the block.
    """
    refusal: InvalidInput | None = None
    try:
        yield
    except InvalidInput as error:
        refusal = error
    own = refusal and [refusal.message, refusal.reason.value, refusal.metadata.get("field", "")]
    refusals = [theirs for theirs in gather_json(own, torch.device("cpu")) if theirs]
    if refusal is not None:
        raise refusal
    if refusals:
        message, reason, field = refusals[0]
        raise InvalidInput(message, reason=Reason(reason), field=field)
