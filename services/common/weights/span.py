"""Reads weights in the order of a plan, and those that are neighbors in memory at once.

A mixture of experts has tens of thousands of weights, which a rank keeps in a few large tensors. Handling each by
itself would take longer than copying their bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.common.errors import InternalError

if TYPE_CHECKING:
    from services.common.weights.plan import Place


@dataclass(frozen=True)
class Span:
    """Holds consecutive weights of a plan, each right after the one before: their names, and all numbers, 1-D."""

    names: Sequence[str]
    flat: torch.Tensor


Item = tuple[str, torch.Tensor] | Span
Items = Iterable[Item]


class Source:
    """Reads weights in the order of a plan."""

    def __init__(self, items: Items):
        self._items: Iterator[Item] = iter(items)
        self._rest: Span | None = None

    def take(self, places: Sequence["Place"], begin: int) -> tuple[int, torch.Tensor]:
        """Returns how many of the places from `begin` on the next copy fills, at least one, and what to copy.

        Raises:
            InternalError: What comes next is not what belongs there.
        """
        item, self._rest = self._rest or next(self._items, None), None
        if not isinstance(item, Span):
            return 1, _checked(places[begin], item)
        filled = places[begin : begin + len(item.names)]
        num_bytes = sum(place.num_bytes for place in filled)
        numel = num_bytes // item.flat.element_size()
        if len(filled) < len(item.names):
            self._rest = Span(item.names[len(filled) :], item.flat[numel:])
        _check(filled, item.names, item.flat[:numel], num_bytes)
        return len(filled), item.flat[:numel]

    def end(self) -> None:
        """Raises InternalError if anything is left."""
        item = self._rest or next(self._items, None)
        if item is not None:
            name = item.names[0] if isinstance(item, Span) else item[0]
            raise InternalError(f"export order changed: the plan ends before {name}")


def _checked(place: "Place", item: tuple[str, torch.Tensor] | None) -> torch.Tensor:
    name, tensor = item or ("nothing", torch.empty(0))
    if (name, tensor.dtype, tuple(tensor.shape)) != (place.name, place.dtype, place.shape):
        raise InternalError(
            f"export order changed: the plan has {place.name} {place.dtype} {place.shape}, "
            f"got {name} {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


def _check(places: Sequence["Place"], names: Sequence[str], flat: torch.Tensor, num_bytes: int) -> None:
    """Checks that the numbers of the weights with these names, or of the first of them, fill `places` without gaps."""
    planned = [place.name for place in places]
    if planned != list(names[: len(places)]) or {place.dtype for place in places} != {flat.dtype}:
        raise InternalError(f"export order changed: the plan has {planned[0]} and so on, got {names[0]} and so on")
    covered = places[-1].offset + places[-1].num_bytes - places[0].offset
    if not covered == num_bytes == flat.numel() * flat.element_size():
        raise InternalError(f"{names[0]} and so on: {flat.numel()} numbers do not fill {covered} bytes of the plan")
