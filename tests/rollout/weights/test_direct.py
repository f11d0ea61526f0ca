"""Tests that direct loading gives the same weights as vLLM's reload, or is not used."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from services.common.weights.buckets import WeightDigest
from services.rollout import loading
from services.rollout.compat.worker import reload_weights
from services.rollout.loading import Copy, DirectMap, Piece, Place, Recorder
from tests.rollout.toy_engine import CPU, Layer, Loader, Toy, Worker, adapter, checkpoint, method

# One bucket for each tensor, buckets of several tensors, and one bucket for all.
BUCKET_BYTES = [1, 700, 1 << 20]


def assert_exact(model: Toy, seed: int, odd: Callable[[], Layer] | None = None) -> None:
    """Asserts that `model` is equal to a twin into which vLLM reloaded `checkpoint(seed)`, and to what was sent."""
    twin, sent = Toy(odd() if odd else None), dict(checkpoint(seed))
    reload_weights(twin, None, sent.items())
    ours, theirs = model.state_dict(), twin.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert torch.equal(ours["head.weight"][:21], sent["embed.weight"])
    assert not ours["head.weight"][21:].any()
    assert model.head.weight is model.embed.weight
    for kind in ("weight", "bias"):
        parts = [sent[f"{part}.{kind}"].chunk(2)[1] for part in "qkv"]
        assert torch.equal(ours[f"qkv.{kind}"], torch.cat(parts))
    assert torch.equal(ours["o.weight"], sent["o.weight"][:, 5:])
    assert torch.equal(ours["experts.w13"][2], torch.cat([sent["experts.2.gate"], sent["experts.2.up"]]))


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_a_reload_is_watched_then_checked_then_replaced(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch):
    worker = Worker(Toy(), bucket_bytes)
    addresses = {name: tensor.data_ptr() for name, tensor in worker.model.state_dict().items()}
    assert not worker.loading._problem
    digests = {worker.publish(1)["digest"]}
    assert worker.loading._map is not None, worker.loading._problem
    assert not worker.loading.reads_in_place
    assert_exact(worker.model, 1)
    digests.add(worker.publish(2)["digest"])
    assert worker.loading.reads_in_place, worker.loading._problem
    assert_exact(worker.model, 2)
    monkeypatch.setattr(loading, "reload_weights", None)
    for seed in (3, 4, 5):
        digests.add(worker.publish(seed)["digest"])
        assert_exact(worker.model, seed)
    assert len(digests) == 5
    # The addresses are the same as before, because captured CUDA graphs read there.
    assert {name: tensor.data_ptr() for name, tensor in worker.model.state_dict().items()} == addresses


def test_copies_of_neighbors_to_neighbors_become_one():
    engine, bucket = torch.zeros(4, 6), torch.arange(24.0)
    storage = engine.untyped_storage()

    def copy(begin: int, num: int, at: int, shape: tuple[int, ...] = (), stride: tuple[int, ...] = (1,)) -> Copy:
        return Copy(Piece(0, torch.float32, Place(begin, shape or (num,), stride)), storage, at, stride)

    # Two matrices of two rows, a difference in the engine, and a matrix that is transposed in both.
    whole = [copy(0, 6, 0, (2, 3), (3, 1)), copy(6, 6, 6, (2, 3), (3, 1))]
    direct = DirectMap([*whole, copy(12, 2, 14), copy(14, 6, 16, (2, 3), (1, 2))], 1)
    assert [target.numel() for target in direct._targets[0]] == [12, 2, 6]
    direct.load(0, bucket.view(torch.uint8))
    expected = torch.cat([torch.arange(12.0), torch.zeros(2), torch.arange(12.0, 20.0), torch.zeros(2)])
    assert torch.equal(engine.view(-1), expected)


def test_a_new_plan_starts_anew():
    worker = Worker(Toy(), 700)
    for seed in (1, 2, 3):
        worker.publish(seed)
    worker.set_bucket_bytes(700)
    assert worker.loading.reads_in_place  # the plan is the same, so nothing starts anew
    worker.set_bucket_bytes(1)
    assert not worker.loading.reads_in_place
    for seed in (4, 5, 6):
        worker.publish(seed)
        assert_exact(worker.model, seed)
    assert worker.loading.reads_in_place


# A publication breaks off in each stage of loading, after `num_before` others; the next one must be whole.
@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 700])
def test_a_publication_that_breaks_off_is_made_good_by_the_next(num_before: int, bucket_bytes: int):
    worker = Worker(Toy(), bucket_bytes)
    for seed in range(num_before):
        worker.publish(seed)
    is_direct = worker.loading.reads_in_place
    for breaks_after in range(0, worker.num_buckets, 3 if bucket_bytes == 1 else 1):
        assert "Broken" in worker.publish(10, breaks_after=breaks_after)["error"]
        assert worker.loading.reads_in_place == is_direct
    for seed in (20, 21, 22):
        assert "error" not in worker.publish(seed)
        assert_exact(worker.model, seed)
    assert worker.loading.reads_in_place
    assert "Broken" in worker.publish(30, breaks_after=1)["error"]
    worker.publish(31)
    assert_exact(worker.model, 31)


def _transpose(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def _cast(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.bfloat16(), requires_grad=False)


def _scale(layer: nn.Module) -> None:
    layer.weight.data.mul_(0.5)


def _cut_off(layer: nn.Module) -> None:
    layer.weight.data[:1].zero_()


def _quantize(layer: nn.Module) -> None:
    """Adds a scale to the layer that follows from its weight."""
    layer.scale = nn.Parameter(layer.weight.data.abs().max().reshape(1), requires_grad=False)


def _cast_when_loaded(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded.bfloat16())


def _scale_when_loaded(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded * 2)


def _compose(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded)
    param.data.copy_(-torch.exp(param.data))


def _largest_value(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.fill_(loaded.max().item())


def _through_a_copy(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded.clone())


def _odd(
    process: Callable[[nn.Module], None] = lambda layer: None, loader: Loader | None = None, **kind: torch.dtype
) -> Layer:
    weight = torch.full((4, 6), 7.0, **kind)
    return Layer(method("UnquantizedLinearMethod", process), weight=(weight, loader))


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        (lambda: _odd(_transpose), "computes"),
        (lambda: _odd(_cast), "computes"),
        (lambda: _odd(_scale), "computes"),
        (lambda: _odd(_quantize), "computes"),
        (lambda: _odd(_cut_off), "rearranged or completed"),
        (lambda: _odd(dtype=torch.bfloat16), "converted"),
        (lambda: _odd(loader=_cast_when_loaded), "computes"),
        (lambda: _odd(loader=_scale_when_loaded), "computes"),
        (lambda: _odd(loader=_compose), "computes"),
        (lambda: _odd(loader=_largest_value), "computes"),
        (lambda: _odd(loader=_through_a_copy), "computes"),
        (lambda: Layer(method("Fp8LinearMethod"), weight=(torch.zeros(4, 6), None)), "Fp8LinearMethod"),
    ],
)
def test_a_layer_that_does_more_than_copy_keeps_the_reload(odd: Callable[[], Layer], problem: str):
    worker = Worker(Toy(odd()), 700)
    for seed in (1, 2, 3, 4):
        assert "error" not in worker.publish(seed)
        assert not worker.loading.reads_in_place
        assert problem in worker.loading._problem
        assert_exact(worker.model, seed, odd)


def test_a_transposed_view_is_a_copy_too():
    def load(param: torch.Tensor, loaded: torch.Tensor) -> None:
        param.data.copy_(loaded.t())

    odd = lambda: Layer(method("UnquantizedLinearMethod"), weight=(torch.zeros(6, 4), load))  # noqa: E731
    worker = Worker(Toy(odd()), 700)
    for seed in (1, 2, 3):
        worker.publish(seed)
        assert_exact(worker.model, seed, odd)
    assert worker.loading.reads_in_place


@pytest.mark.parametrize("end", ["source", "target"])
@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_wrong_map_is_found_out(end: str, number: int, monkeypatch: pytest.MonkeyPatch):
    right = Recorder.copies.fget

    def tampered(recorder: Recorder) -> list:
        copies = list(right(recorder))
        copy = copies[number]
        if end == "source":
            place = copy.piece.place
            piece = dataclasses.replace(copy.piece, place=place._replace(offset=place.offset + 1))
            copy = dataclasses.replace(copy, piece=piece)
        else:
            copy = dataclasses.replace(copy, offset=copy.offset + 1)
            copy.storage.resize_(copy.storage.nbytes() + 16)  # else a shifted copy would not fit
        copies[number] = copy
        return copies

    monkeypatch.setattr(Recorder, "copies", property(tampered))
    worker = Worker(Toy(), 1 << 20)
    worker.publish(1)
    assert worker.loading._map is not None
    for seed in (2, 3, 4):
        worker.publish(seed)
        assert not worker.loading.reads_in_place
        assert "wrote other bytes than the recorded copies would" in worker.loading._problem
        assert_exact(worker.model, seed)


def test_a_map_with_the_same_bytes_in_two_places_is_checked_in_both():
    """Tests received bytes that are copied to two tensors, one of which then holds something else."""
    flat = torch.arange(16, dtype=torch.uint8)
    recorder, one, other = Recorder(), torch.zeros(4), torch.zeros(4)
    with recorder:
        recorder.add_bucket(0, flat)
        for target in (one, other):
            between = torch.empty(4)
            between.copy_(flat.view(torch.float32))
            target.copy_(between)
    direct = DirectMap(recorder.copies, 1)

    def digests() -> tuple[str, str]:
        received, loaded = (WeightDigest("", CPU) for _ in range(2))
        loading._add(received, direct.received(0, flat), 0)
        loading._add(loaded, direct.loaded(0), 0)
        return received.hexdigest(), loaded.hexdigest()

    assert len(set(digests())) == 1
    for target in (one, other):
        target[2] += 1
        assert len(set(digests())) == 2
        target[2] -= 1


def test_addresses_that_are_used_again_are_not_confused():
    """Frees memory of received buckets, of loaded weights and of padding, which comes back as something else."""
    size = 4096  # glibc would give smaller pieces back only to other callers
    recorder, engine, others = Recorder(), torch.zeros(size), torch.zeros(size)
    freed, num_reused = set(), 0
    with recorder:
        for index in range(20):
            flat = torch.empty(4 * size, dtype=torch.uint8)
            recorder.add_bucket(index, flat)
            between = torch.empty(size)
            between.copy_(flat.view(torch.float32))
            engine.copy_(between)
            padding = torch.empty(size)
            padding.fill_(1)
            freed |= {tensor.data_ptr() for tensor in (flat, between, padding)}
            del flat, between, padding
            computed = [torch.ones(size), torch.ones(size), torch.ones(size)]
            num_reused += len(freed & {tensor.data_ptr() for tensor in computed})
            for tensor in computed:
                others.copy_(tensor * 3)
            del computed, tensor
    assert num_reused  # else nothing was tested
    assert {copy.storage.data_ptr() for copy in recorder.copies} == {engine.data_ptr()}
    assert [copy.piece.bucket for copy in recorder.copies] == list(range(20))


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_a_base_counts_as_held_only_while_it_is_whole(bucket_bytes: int):
    """Tests all stages of loading: after a whole base, adapters come alone; a base that broke off is sent again."""
    worker = Worker(Toy(), bucket_bytes)
    worker.set_adapter_plan(bucket_bytes)
    num_base = worker._lockstep_plan.num_base_buckets

    def assert_holds(base_seed: int, adapter_seed: int) -> None:
        assert_exact(worker.model, base_seed)
        sent = dict(adapter(adapter_seed))
        assert worker.adapter.keys() == sent.keys()
        assert all(torch.equal(worker.adapter[name], tensor) for name, tensor in sent.items())

    for seed in range(5):  # watched, again because it broke off, checked, direct, direct
        breaks_off = seed in (0, 4)
        if breaks_off:
            torn = worker.publish_adapter(seed, 10, sender_sums=(1, 1), breaks_after=num_base - 1)
            assert "Broken" in torn["error"]
            assert worker.base_sums == (0, 0)
        whole = worker.publish_adapter(seed, 10, sender_sums=(1, 1))
        sums = worker.base_sums
        assert_holds(seed, 10)
        alone = worker.publish_adapter(-1, 11, sender_sums=sums)
        assert alone["digest"] != whole["digest"]
        assert alone["num_bytes"] < whole["num_bytes"]
        assert_holds(seed, 11)
        if breaks_off:  # this leaves the base and the last adapter
            assert "Broken" in worker.publish_adapter(-1, 12, sender_sums=sums, breaks_after=0)["error"]
            assert worker.base_sums == sums
            assert_holds(seed, 11)
        assert worker.publish_adapter(-1, 10, sender_sums=sums)["digest"] == whole["digest"]
    assert worker.loading.reads_in_place, worker.loading._problem
