"""Encodes routed experts: for each token, the experts that every layer of a mixture-of-experts model chose.

The routed experts of a sample of n tokens (prompt and completion) are n - 1 rows, because the model does not read the
last token. A row has `num_layers` x `top_k` expert numbers, in the order of layers, as uint8, or as little-endian
uint16 if there are more than 256 experts. Those of a dense layer are 0.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from lockstep.rollout.v1.rollout_pb2 import CompletionPart

from services.common.errors import InternalError, InvalidInput
from services.common.families.architecture import make_architecture


@dataclass(frozen=True)
class RoutedExpertsShape:
    """The shape of the routed experts of a model with experts in all layers, except `dense_layers`."""

    num_layers: int
    num_experts: int
    top_k: int
    dense_layers: frozenset[int] = frozenset()

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(np.uint8 if self.num_experts <= 256 else "<u2")

    @property
    def expert_layers(self) -> list[int]:
        """The numbers of the layers with experts."""
        return [number for number in range(self.num_layers) if number not in self.dense_layers]

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a token's routed experts."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def encode(self, experts_TLK: np.ndarray) -> bytes:
        """Returns the bytes of routed experts [tokens, layers, top_k].

        Raises:
            ValueError: The routed experts are not those of this model, or name an expert that does not exist.
        """
        if experts_TLK.shape[1:] != (self.num_layers, self.top_k):
            expected = f"[tokens, {self.num_layers}, {self.top_k}]"
            raise ValueError(f"routed_experts have the shape {list(experts_TLK.shape)}, expected {expected}")
        if self.dense_layers:  # of which the engine may return anything
            given_TLK, experts_TLK = experts_TLK, np.zeros_like(experts_TLK)
            experts_TLK[:, self.expert_layers] = given_TLK[:, self.expert_layers]
        if experts_TLK.size and not 0 <= experts_TLK.min() <= experts_TLK.max() < self.num_experts:
            raise ValueError(f"routed_experts name expert {experts_TLK.max()}, but there are only {self.num_experts}")
        return experts_TLK.astype(self.dtype).tobytes()

    def decode(self, data: bytes | memoryview) -> np.ndarray:
        """Returns routed experts [tokens, layers, top_k] without copying them."""
        return np.frombuffer(data, self.dtype).reshape(-1, self.num_layers, self.top_k)


def routed_experts_shape(config_json: bytes | str) -> RoutedExpertsShape | None:
    """Returns the shape of the routed experts of the model with this config.json.

    Returns None if all its layers are dense, its family is unknown, or it is no JSON.
    """
    try:
        model = make_architecture(json.loads(config_json), "config.json")
    except (InvalidInput, ValueError):
        return None
    if not model.num_experts:
        return None
    return RoutedExpertsShape(model.num_layers, model.num_experts, model.num_experts_per_tok, model.dense_layers)


# Messages of this size do not block the event loop for long.
PART_BYTES = 1 << 20


def to_parts(routed_experts: Sequence[bytes], *, part_bytes: int = PART_BYTES) -> Iterator[CompletionPart]:
    """Yields the routed experts of a group's completions in parts, without bytes at the start that equal the first
    one's."""
    for index, data in enumerate(routed_experts):
        num_shared = _num_shared(routed_experts[0], data) if index else 0
        own = data[num_shared:]
        for begin in range(0, max(1, len(own)), part_bytes):
            yield CompletionPart(
                completion=index, num_shared_bytes=0 if begin else num_shared, data=own[begin : begin + part_bytes]
            )


def from_parts(parts: Iterable[CompletionPart], num_completions: int) -> list[bytes]:
    """Returns the routed experts of each completion; an empty list if there are no parts."""
    joined: list[bytearray] = []
    for part in parts:
        if part.completion == len(joined):
            joined.append(bytearray(joined[0][: part.num_shared_bytes] if joined else b""))
        elif part.completion != len(joined) - 1:
            raise InternalError(
                f"routed_experts of completion {part.completion} came after those of {len(joined)} completions"
            )
        joined[-1] += part.data
    if joined and len(joined) != num_completions:
        raise InternalError(f"{len(joined)} of {num_completions} completions came with routed experts")
    return list(map(bytes, joined))


def _num_shared(first: bytes, other: bytes) -> int:
    size = min(len(first), len(other))
    differs = np.frombuffer(first, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differs.argmax()) if differs.any() else size
