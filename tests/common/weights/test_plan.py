"""Tests the plan's buckets and the content digest."""

import hashlib
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep.types.v1.types_pb2 import TensorSpec, WeightPlan

from services.common.errors import InternalError, InvalidInput
from services.common.weights.buckets import Span, WeightDigest, pack, pack_rounds, unpack
from services.common.weights.plan import ALIGN_BYTES, Plan
from tests.common.weights.group_harness import CPU, NamedTensor, digest_of, some_weights
from tests.support import raises

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


@st.composite
def weights(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    specs = draw(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12))
    return [(f"w{i}", random_bytes(dtype, shape, i)) for i, (dtype, shape) in enumerate(specs)]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@settings(max_examples=60, deadline=None)
@given(weights=weights(), bucket_bytes=st.integers(1, 600))
def test_buckets_hold_every_tensor_once_aligned_and_in_order(weights, bucket_bytes: int) -> None:
    plan = Plan.of(weights, bucket_bytes=bucket_bytes)
    places = [place for bucket in plan.buckets for place in bucket.places]
    assert [(s.name, s.dtype, s.shape) for s in places] == [(n, t.dtype, tuple(t.shape)) for n, t in weights]
    assert plan.num_bytes == sum(tensor.nbytes for _, tensor in weights)
    start = 0
    for bucket in plan.buckets:
        assert bucket.start == start
        assert bucket.num_bytes % ALIGN_BYTES == 0
        assert bucket.num_bytes <= bucket_bytes + ALIGN_BYTES or len(bucket.places) == 1
        ends = [0]
        for place in bucket.places:
            assert place.offset % ALIGN_BYTES == 0
            assert ends[-1] <= place.offset < ends[-1] + ALIGN_BYTES
            ends.append(place.offset + place.num_bytes)
        assert ends[-1] <= bucket.num_bytes
        start += bucket.num_bytes
    # The other end makes the buckets from the message that it receives, not from these tensors.
    assert Plan(WeightPlan.FromString(plan.message.SerializeToString())).buckets == plan.buckets


@settings(max_examples=60, deadline=None)
@given(weights=weights(), bucket_bytes=st.integers(1, 600))
def test_unpacked_weights_are_the_packed_ones(weights, bucket_bytes: int) -> None:
    plan = Plan.of(weights, bucket_bytes=bucket_bytes)
    got = [named for bucket, flat in pack(plan, weights, CPU) for named in unpack(bucket, flat)]
    for (name, tensor), (want_name, want) in zip(got, weights, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (want_name, want.dtype, want.shape)
        assert as_bytes(tensor) == as_bytes(want)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=9), bucket_bytes=st.integers(1, 600), data=st.data())
def test_neighbors_in_memory_are_packed_as_one_by_one(lengths: list[int], bucket_bytes: int, data: st.DataObject):
    rows = random_bytes(torch.bfloat16, (sum(lengths), ALIGN_BYTES), 0)
    weights = [(f"w{i}", part) for i, part in enumerate(rows.split(lengths))]
    items: list[Any] = []
    begin = 0
    while begin < len(weights):
        num = data.draw(st.integers(1, len(weights) - begin))
        flat = torch.cat([part for _, part in weights[begin : begin + num]]).view(-1)
        is_span = num > 1 or data.draw(st.booleans())
        items.append(Span([name for name, _ in weights[begin : begin + num]], flat) if is_span else weights[begin])
        begin += num
    plan = Plan.of(weights, bucket_bytes=bucket_bytes)
    got = [(bucket.start, as_bytes(flat)) for bucket, flat in pack(plan, items, CPU)]
    assert got == [(bucket.start, as_bytes(flat)) for bucket, flat in pack(plan, weights, CPU)]


@pytest.mark.parametrize(
    ("names", "numel", "problem"),
    [
        (["a", "c"], 32, "the plan has b torch.bfloat16, got c"),
        (["a", "b"], 31, "do not fill 64 bytes"),
        (["a", "b"], 33, "do not fill 64 bytes"),
        (["a", "b", "c"], 48, "the plan ends before c"),
    ],
)
def test_neighbors_that_are_not_the_plans_are_an_error(names: list[str], numel: int, problem: str) -> None:
    plan = Plan.of([(name, torch.zeros(16, dtype=torch.bfloat16)) for name in "ab"], bucket_bytes=100)
    with pytest.raises(InternalError, match=problem):
        list(pack(plan, [Span(names, torch.zeros(numel, dtype=torch.bfloat16))], CPU))


def test_neighbors_between_which_the_bucket_has_gaps_are_an_error() -> None:
    plan = Plan.of([(name, torch.zeros(3)) for name in "ab"], bucket_bytes=100)
    with pytest.raises(InternalError, match="do not fill"):
        list(pack(plan, [Span(["a", "b"], torch.zeros(6))], CPU))


@settings(max_examples=40, deadline=None)
@given(weights=weights(), sizes=st.lists(st.integers(1, 600), min_size=2, max_size=2, unique=True))
def test_plan_digest_does_not_depend_on_the_bucket_size(weights, sizes: list[int]) -> None:
    one, other = (Plan.of(weights, bucket_bytes=size) for size in sizes)
    assert one.digest == other.digest


@settings(max_examples=40, deadline=None)
@given(base=weights(), adapter=weights(), bucket_bytes=st.integers(1, 600))
def test_an_adapter_begins_with_a_bucket_of_its_own_and_completes_the_digest_of_its_base(
    base, adapter, bucket_bytes: int
) -> None:
    plan = Plan.with_adapter(base, adapter, adapter_config_json="{}", bucket_bytes=bucket_bytes)
    plan = Plan(WeightPlan.FromString(plan.message.SerializeToString()))
    assert plan.has_adapter
    names = [[place.name for place in bucket.places] for bucket in plan.buckets]
    assert [*itertools.chain(*names[: plan.num_base_buckets])] == [name for name, _ in base]
    assert [*itertools.chain(*names[plan.num_base_buckets :])] == [name for name, _ in adapter]
    base_bytes, adapter_bytes = (sum(tensor.nbytes for _, tensor in part) for part in (base, adapter))
    assert plan.num_bytes_sent(skips_base=False) == plan.num_bytes == base_bytes + adapter_bytes
    assert plan.num_bytes_sent(skips_base=True) == adapter_bytes

    first = WeightDigest("", CPU)
    for bucket, flat in list(pack(plan, [*base, *adapter], CPU))[: plan.num_base_buckets]:
        first.update(flat, start=bucket.start)
    second = WeightDigest(plan.digest, CPU, first.sums())
    for bucket, flat in pack(plan, adapter, CPU, skips_base=True):
        second.update(flat, start=bucket.start)
    assert second.hexdigest() == digest_of(plan, [*base, *adapter])


def test_the_scale_of_an_adapter_is_part_of_the_digest() -> None:
    weights = some_weights()
    one, other = (
        Plan.with_adapter(weights[:3], weights[3:], adapter_config_json=config, bucket_bytes=600)
        for config in ('{"lora_alpha": 1}', '{"lora_alpha": 2}')
    )
    assert one.digest != other.digest


def test_content_digest_does_not_depend_on_the_bucket_size_or_order() -> None:
    weights = some_weights(large=1000)
    # Buckets hold whole tensors, so a tensor keeps its place in the publication whatever the size of buckets is.
    digests = {digest_of(Plan.of(weights, bucket_bytes=size), weights) for size in (1, 64, 5000, 1 << 20)}
    assert len(digests) == 1
    plan = Plan.of(weights, bucket_bytes=64)
    backwards = WeightDigest(plan.digest, CPU)
    for bucket, flat in reversed(list(pack(plan, weights, CPU))):
        backwards.update(flat, start=bucket.start)
    assert backwards.hexdigest() in digests


def test_content_digest_does_not_depend_on_the_scratch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = some_weights(large=1000)
    plan = Plan.of(weights, bucket_bytes=1 << 20)
    want = digest_of(plan, weights)
    monkeypatch.setattr("services.common.weights.buckets._CHUNK_WORDS", 3)
    assert digest_of(plan, weights) == want


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_changes_the_digest(data: st.DataObject) -> None:
    weights = some_weights(num_large=1, large=64)
    plan = Plan.of(weights, bucket_bytes=1 << 20)
    ((bucket, flat),) = pack(plan, weights, CPU)
    want = digest_of(plan, weights)
    at, bit = data.draw(st.integers(0, bucket.num_bytes - 1)), data.draw(st.integers(0, 7))
    flat[at] ^= 1 << bit
    digest = WeightDigest(plan.digest, CPU)
    digest.update(flat, start=0)
    assert digest.hexdigest() != want


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_words_that_change_places_change_the_digest(data: st.DataObject) -> None:
    words = torch.randint(-(2**62), 2**62, (16,), generator=torch.Generator().manual_seed(1))
    one, other = data.draw(st.lists(st.integers(0, 15), min_size=2, max_size=2, unique=True))
    swapped = words.clone()
    swapped[one], swapped[other] = words[other], words[one]
    digests = []
    for content in (words, swapped):
        digest = WeightDigest("plan", CPU)
        digest.update(content.view(torch.uint8), start=0)
        digests.append(digest.hexdigest())
    assert digests[0] != digests[1]


def test_swapped_tensors_change_the_digest() -> None:
    one, other = torch.randn(64), torch.randn(64)
    plan = Plan.of([("a", one), ("b", other)], bucket_bytes=1 << 20)
    assert digest_of(plan, [("a", one), ("b", other)]) != digest_of(plan, [("a", other), ("b", one)])


def test_names_are_part_of_the_digest() -> None:
    tensor = torch.zeros(64)
    one, other = (Plan.of([(name, tensor)], bucket_bytes=1 << 20) for name in ("a", "b"))
    assert digest_of(one, [("a", tensor)]) != digest_of(other, [("b", tensor)])


def _mixed(word: int, position: int) -> int:
    """Returns MurmurHash3's 64-bit finalizer (Appleby 2011) of a word and its place, computed with plain integers."""
    mask = 2**64 - 1
    word ^= position * 0x9E3779B97F4A7C15 & mask
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & mask
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & mask
    return word ^ word >> 33


def test_digest_is_the_one_that_is_described() -> None:
    """Replicas of another build must compute the same digest, so a change of its value changes the protocol."""
    content = random_bytes(torch.uint8, (160,), seed=3)
    words = struct.unpack("<20Q", as_bytes(content))
    mixed = [_mixed(word, position) for position, word in enumerate(words, start=1)]
    sums = [sum(mixed), sum((m ^ m >> 29) * 0xFF51AFD7ED558CCD for m in mixed)]
    hasher = hashlib.blake2b(b"plan", digest_size=16)
    for value in sums:
        hasher.update((value % 2**64).to_bytes(8, "little"))
    digest = WeightDigest("plan", CPU)
    digest.update(content, start=0)
    assert digest.hexdigest() == hasher.hexdigest()


@pytest.mark.parametrize(
    "sent",
    [
        [("a", torch.zeros(4)), ("c", torch.zeros(4))],
        [("b", torch.zeros(4)), ("a", torch.zeros(4))],
        [("a", torch.zeros(4)), ("b", torch.zeros(2, 3))],  # 2 times 2 would be rows in groups
        [("a", torch.zeros(4)), ("b", torch.zeros(1, 2, 2))],
        [("a", torch.zeros(4)), ("b", torch.zeros(4).half())],
        [("a", torch.zeros(4))],
        [("a", torch.zeros(4)), ("b", torch.zeros(4)), ("c", torch.zeros(4))],
    ],
)
def test_export_that_is_not_the_plan_is_an_error(sent: list[tuple[str, torch.Tensor]]) -> None:
    plan = Plan.of([("a", torch.zeros(4)), ("b", torch.zeros(4))], bucket_bytes=1 << 20)
    with pytest.raises(InternalError, match="export order"):
        list(pack(plan, sent, CPU))


def test_rounds_of_several_senders() -> None:
    a, b, c, d = weights = [(name, torch.full([4], index)) for index, name in enumerate("abcd")]
    plan = Plan.of(weights, bucket_bytes=1 << 20, slots=[(0, 1), (1, 2), (0, 1)])
    assert plan.num_senders == 2
    assert [[bucket.sender for bucket in buckets] for buckets in plan.rounds] == [[0, 1], [0]]
    flats = [flat for _, flat in pack_rounds(plan, [[a], [d]], CPU, sender=0)]
    assert [flat is None for flat in flats] == [False, True, False]
    assert torch.equal(flats[2].view(torch.int64), d[1])
    (none, own, _) = [flat for _, flat in pack_rounds(plan, [[b, c], []], CPU, sender=1)]
    assert none is None
    assert torch.equal(own.view(torch.int64), torch.cat([b[1], c[1]]))
    for wrong, problem in (([[b], [d]], "the plan has a"), ([[], [d]], "got nothing"), ([[a, b], [d]], "before b")):
        with pytest.raises(InternalError, match=problem):
            list(pack_rounds(plan, wrong, CPU, sender=0))


def test_a_turn_of_nothing_but_empty_tensors() -> None:
    empty, whole = ("empty", torch.zeros(0)), ("whole", torch.ones(4))
    plan = Plan.of([empty, whole], bucket_bytes=1 << 20, slots=[(0, 1), (1, 1)])
    none, (_, own) = pack_rounds(plan, [[whole]], CPU, sender=1)
    assert none[1] is None
    assert torch.equal(own.view(torch.float32), whole[1])
    assert next(pack_rounds(plan, [[empty]], CPU, sender=0))[1].numel() == 0


def test_a_round_is_taken_before_any_of_it_is_given_out() -> None:
    weights = [(name, torch.zeros(4)) for name in "abc"]
    plan = Plan.of(weights, bucket_bytes=1 << 20, slots=[(0, 1), (1, 1), (0, 1)])
    taken = []

    def gather(number: int, own: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
        yield from own
        taken.append(number)

    packed = pack_rounds(plan, itertools.starmap(gather, enumerate([[weights[1]], []])), CPU, sender=1)
    assert [(next(packed)[0].sender, list(taken)) for _ in range(3)] == [(0, [0]), (1, [0]), (0, [0, 1])]


@pytest.mark.parametrize("slots", [[(2, 1)], [(1, 2)], [(1, 0)]])
def test_plan_with_other_turns_than_tensors_or_senders_is_refused(slots: list[tuple[int, int]]) -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=[1])
    message = WeightPlan(tensors=[spec], bucket_bytes=64, num_senders=2)
    for sender, num_tensors in slots:
        message.slots.add(sender=sender, num_tensors=num_tensors)
    with raises(InvalidInput, field="plan"):
        Plan(message)


def test_plan_with_an_unknown_dtype_is_refused() -> None:
    for dtype in ("float33", "Tensor", "os"):
        with raises(InvalidInput, field="plan"):
            Plan(WeightPlan(tensors=[TensorSpec(name="w", dtype=dtype, shape=[1])], bucket_bytes=64, num_senders=1))
