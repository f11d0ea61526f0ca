"""Tests what a stream of an episode's tokens keeps beside them."""

from lockstep.types.v1.types_pb2 import Completion

from services.common.batches import encode_sampling_masks, join_sampling_masks
from services.coordinator.data.groups import Stream


def test_tokens_keep_the_routes_that_they_were_sampled_with() -> None:
    stream = Stream((5, 6))
    stream.add_turn(Completion(tokens=[7, 8]), b"abc")  # one byte for each token but the last
    stream.add_context([9])
    stream.add_turn(Completion(tokens=[10]), b"ABCDE")
    assert stream.routed_experts == b"abcDE"


def test_tokens_of_the_environment_have_no_kept_sets() -> None:
    stream = Stream((5, 6))
    stream.add_turn(Completion(tokens=[7, 8]), sampling_mask=encode_sampling_masks([[7, 1], [8]]))
    stream.add_context([9])
    stream.add_turn(Completion(tokens=[10]), sampling_mask=encode_sampling_masks([[2, 10]]))
    assert join_sampling_masks(stream.sampling_mask) == encode_sampling_masks([[7, 1], [8], [], [2, 10]])
