"""Maps adapters to the names and shapes of PEFT, which Hugging Face and inference engines read."""

import re
from collections.abc import Sequence
from typing import NoReturn

import torch

from services.common.errors import InternalError
from services.common.megatron.lora import PARTS
from services.trainer.adapters import peft_name, refuse_part
from services.trainer.megatron.weights.lora import COLUMN_PARALLEL
from services.trainer.megatron.weights.weight_map import Part, WeightMap


class AdapterMap:
    """Maps adapters as WeightMap maps weights. A fused layer's adapter becomes one per matrix, all with the same A."""

    def __init__(self, weights: WeightMap):
        self._weights = weights

    def part(self, name: str) -> Part:
        """Returns the part of an adapter matrix, such as decoder.layers.3.self_attention.linear_qkv.lora_A.linear_q.

        Raises:
            InternalError: The name is not an adapter's.
            InvalidInput: The adapter is for one part of a matrix that checkpoints store whole.
        """
        match = re.fullmatch(r"(.+\.(\w+))\.lora_([AB])\.(\w+)", name)
        if match is None:
            raise InternalError(f"no adapter tensor is known for Megatron's parameter {name}")
        module, layer, matrix, part = match.groups()
        base, is_column, place = self._weights.part(f"{module}.weight"), layer in COLUMN_PARALLEL, 0
        names = base.names
        if part != layer:
            if base.is_fused:
                raise refuse_part(layer, names[0])
            place = PARTS["canonical_lora"][layer].index(part)
            names = (names[place],)
        if matrix == ("A" if is_column else "B"):
            join = lambda shards: [shards[0]] * len(names)  # noqa: E731
        else:
            join = _join_rows if part != layer else base.join
        peft_names = tuple(peft_name(name, matrix) for name in names)
        return Part(peft_names, _cut, join, order=(*base.order, place, "AB".index(matrix)))

    def is_published(self, name: str) -> bool:
        """Returns True: all adapters are published."""
        return True


def _cut(*args: object) -> NoReturn:
    raise InternalError("adapters are not read from checkpoint names")


def _join_rows(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(list(shards))]
