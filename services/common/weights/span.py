"""Reads weights in the order of a plan, and those that are neighbors in memory at once.

A mixture of experts has tens of thousands of weights, which a rank keeps in a few large tensors. Handling each by
itself would take longer than copying their bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from services.common.errors import InternalError
from services.common.weights.plan import Place


@dataclass(frozen=True)
class Span:
    """Holds consecutive weights of a plan, each right after the one before: their names, and all numbers, 1-D."""

    names: Sequence[str]
    flat: torch.Tensor


@dataclass(frozen=True)
class Computed:
    """Stands for a weight that is computed in the bucket: elsewhere, it would have to be copied there afterwards."""

    like: torch.Tensor
    """Any tensor with the weight's shape and dtype."""
    write: Callable[[torch.Tensor], None]
    """Writes the weight into a tensor of that shape and dtype."""


# A tensor's rows may be in groups: [groups, rows of a group, ...] instead of [rows, ...].
Item = tuple[str, torch.Tensor | Computed] | Span
Items = Iterable[Item]


class Source:
    """Reads weights in the order of a plan."""

    def __init__(self, items: Items):
        self._items: Iterator[Item] = iter(items)
        self._rest: Span | None = None

    def take(self, places: Sequence[Place], begin: int) -> tuple[int, torch.Tensor | Computed]:
        """Returns how many of the places from `begin` on the next item fills, at least one, and what fills them.

        Raises:
            InternalError: What comes next is not what belongs there.
        """
        item, self._rest = self._rest or next(self._items, None), None
        if not isinstance(item, Span):
            return 1, _checked(places[begin], item)
        filled = places[begin : begin + len(item.names)]
        if len(filled) < len(item.names):
            numel = sum(place.num_bytes for place in filled) // item.flat.element_size()
            self._rest = Span(item.names[len(filled) :], item.flat[numel:])
            item = Span(item.names[: len(filled)], item.flat[:numel])
        _require_filled(filled, item)
        return len(filled), item.flat

    def end(self) -> None:
        """Raises InternalError if anything is left."""
        item = self._rest or next(self._items, None)
        if item is not None:
            name = item.names[0] if isinstance(item, Span) else item[0]
            raise InternalError(f"export order changed: the plan ends before {name}")


def _checked(place: Place, item: tuple[str, torch.Tensor | Computed] | None) -> torch.Tensor | Computed:
    name, value = item or ("nothing", torch.empty(0))
    tensor = value.like if isinstance(value, Computed) else value
    shape = tuple(tensor.shape)
    if place.shape and len(shape) == len(place.shape) + 1:  # rows in groups
        shape = (shape[0] * shape[1], *shape[2:])
    if (name, tensor.dtype, shape) != (place.name, place.dtype, place.shape):
        raise InternalError(
            f"export order changed: the plan has {place.name} {place.dtype} {place.shape}, "
            f"got {name} {tensor.dtype} {tuple(tensor.shape)}"
        )
    return value


def _require_filled(places: Sequence[Place], span: Span) -> None:
    """Checks that the weights of a span fill `places`, between which there are no gaps."""
    for place, name in zip(places, span.names, strict=True):
        if (place.name, place.dtype) != (name, span.flat.dtype):
            raise InternalError(
                f"export order changed: the plan has {place.name} {place.dtype}, got {name} {span.flat.dtype}"
            )
    num_bytes = sum(place.num_bytes for place in places)
    covered = places[-1].offset + places[-1].num_bytes - places[0].offset
    if not covered == num_bytes == span.flat.nbytes:
        raise InternalError(
            f"{span.names[0]} to {span.names[-1]}: {span.flat.numel()} numbers do not fill {covered} bytes of the plan"
        )
