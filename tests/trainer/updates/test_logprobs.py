"""Tests log-probabilities from hidden states: values, gradients, split vocabularies, memory."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from services.trainer.updates import logprobs
from services.trainer.updates.logprobs import Targets, linear_logprobs
from services.trainer.updates.softmax import TopK
from tests.trainer.harness_processes import forks
from tests.trainer.updates.logits import (
    TOP_K,
    D,
    M,
    V,
    inputs,
    mixed,
    others,
    plain,
    plain_with_others,
    rest,
    sampling_masks,
    without_padding,
)


def plain_over_masks(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, targets_M: torch.Tensor, mask_MK: torch.Tensor
) -> torch.Tensor:
    """Computes `plain` at temperature 0.7, row by row, over the row's own tokens only."""
    rows = []
    for row, kept in enumerate(mask_MK.long()):
        tokens = torch.unique(kept[kept >= 0]) if (kept >= 0).any() else torch.arange(V)
        target = (tokens == targets_M[row]).nonzero()[0]
        rows.append(plain(hidden_MD[row : row + 1], weight_VD[tokens], target, 0.7))
    return torch.cat(rows, 1)


class Recorder(TorchDispatchMode):
    """Records the shapes of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes += [tuple(leaf.shape) for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        return result


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_values_are_those_of_log_softmax(temperature: float) -> None:
    hidden, weight, targets = inputs()
    got = linear_logprobs(hidden, weight, Targets(targets), temperature)
    torch.testing.assert_close(got, plain(hidden, weight, targets, temperature), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_finite_differences(temperature: float) -> None:
    hidden, weight, targets = inputs()
    assert torch.autograd.gradcheck(lambda h, w: linear_logprobs(h, w, Targets(targets), temperature), (hidden, weight))


@pytest.mark.usefixtures("chunked")
def test_over_sampling_masks_values_and_gradients_are_those_of_a_dense_softmax() -> None:
    hidden, weight, targets = inputs()
    mask_MK = sampling_masks(targets)
    got = linear_logprobs(hidden, weight, Targets(targets, mask_MK), 0.7)
    want = plain_over_masks(hidden, weight, targets, mask_MK)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert got[:, 0].tolist() == [0, 0]  # only one token was kept
    gradients = [torch.autograd.grad(mixed(values), (hidden, weight)) for values in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("row", [0, 1], ids=["logprob", "entropy"])
def test_each_gradient_alone_is_autograds(row: int) -> None:
    hidden, weight, targets = inputs()
    weights_M = torch.arange(1.0, M + 1, dtype=torch.float64)
    got = torch.autograd.grad(
        (linear_logprobs(hidden, weight, Targets(targets), 0.7)[row] * weights_M).sum(), (hidden, weight)
    )
    want = torch.autograd.grad((plain(hidden, weight, targets, 0.7)[row] * weights_M).sum(), (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_single_precision_rounds_no_more_than_it_must() -> None:
    hidden, weight, targets = inputs(torch.float32)
    got = linear_logprobs(hidden, weight, Targets(targets), 0.7)
    assert got.dtype == torch.float32
    # Logits of size 10 have roundings of 10 x 2^-24 = 6e-7, a few of which add up.
    torch.testing.assert_close(got.double(), plain(hidden, weight, targets, 0.7), rtol=0, atol=5e-6)


def test_bfloat16_gives_float32_values_and_bfloat16_gradients() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    got = linear_logprobs(hidden, weight, Targets(targets), 0.7)
    assert got.dtype == torch.float32
    # Logits are rounded to bfloat16's 8 bits once, then all is float32: 10 x 2^-9 per logit.
    torch.testing.assert_close(got.double(), plain(hidden, weight, targets, 0.7), rtol=0, atol=0.1)
    got.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.usefixtures("chunked")
def test_nothing_to_predict() -> None:
    hidden, weight, targets = inputs()
    got = linear_logprobs(hidden[:0], weight, Targets(targets[:0]), 1.0)
    assert got.shape == (2, 0)
    gradients = torch.autograd.grad(got.sum(), (hidden, weight))
    assert [gradient.abs().max().item() for gradient in gradients] == [0, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_logits_do_not_overflow(sign: int) -> None:
    weight = torch.tensor([[1e4], [0.0], [-1e4]], requires_grad=True)
    hidden = torch.tensor([[1.0], [1.0], [1.0]]).mul(sign).requires_grad_()
    got = linear_logprobs(hidden, weight, Targets(torch.tensor([0, 1, 2])), 1.0)
    want = [0.0, -1e4, -2e4] if sign == 1 else [-2e4, -1e4, 0.0]
    assert got.tolist() == [want, [0.0, 0.0, 0.0]]
    got.sum().backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_uniform_distribution_has_the_entropy_of_its_size() -> None:
    got = linear_logprobs(torch.zeros(2, 3), torch.randn(V, 3), Targets(torch.tensor([0, 5])), 1.0)
    torch.testing.assert_close(got, torch.tensor([[-math.log(V)] * 2, [math.log(V)] * 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("chunked")
def test_weight_gradient_is_added_to_megatrons_sum(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(dtype)
    (want,) = torch.autograd.grad(linear_logprobs(hidden, weight, Targets(targets), 0.7).sum(), weight)
    before = torch.randn(V, D)
    weight.main_grad = before.clone()
    linear_logprobs(hidden, weight, Targets(targets), 0.7).sum().backward()
    assert weight.grad_added_to_main_grad and weight.grad.dtype == dtype
    # Up to 7 chunks are added in another order: 7 x 2^-24 of values up to 32. bfloat16 has 8 bits.
    tolerance = {"rtol": 0, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 2**-8, "atol": 2e-5}
    torch.testing.assert_close(weight.main_grad - before, want.float(), **tolerance)


@pytest.mark.parametrize("sizes", [(3, 7), (7, 3), (3, 3), (7, 7)])
def test_a_bfloat16_sum_gets_the_gradients_of_small_and_large_micro_batches(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's hook adds what autograd returns unless the flag is set, which stays so until the update."""
    monkeypatch.setitem(logprobs._KEPT_ENTRIES, "cpu", 3 * V)
    monkeypatch.setitem(logprobs._ENTRIES_PER_CHUNK, "cpu", 2 * V)
    hidden, weight, targets = inputs(torch.bfloat16)
    total, weight.main_grad = torch.zeros(V, D), torch.zeros(V, D, dtype=torch.bfloat16)
    for size in sizes:
        alone = weight.detach().clone().requires_grad_()
        value = linear_logprobs(hidden[:size], alone, Targets(targets[:size]), 0.7).sum()
        total += torch.autograd.grad(value, alone)[0].float()
        linear_logprobs(hidden[:size], weight, Targets(targets[:size]), 0.7).sum().backward()
        assert weight.grad_added_to_main_grad
        weight.grad = None
    # Two sums of up to 64, each rounded to 8 bits.
    torch.testing.assert_close(weight.main_grad.float(), total, rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("change", [{"zero_out_wgrad": True}, {"shared_embedding": True}])
def test_weight_gradient_is_returned_where_megatron_must_add_it(change: dict[str, Any]) -> None:
    """These are weights that are tied to the embedding."""
    hidden, weight, targets = inputs(torch.bfloat16)
    (want,) = torch.autograd.grad(linear_logprobs(hidden, weight, Targets(targets), 0.7).sum(), weight)
    weight.main_grad = torch.zeros(V, D)
    vars(weight).update(change)
    linear_logprobs(hidden, weight, Targets(targets), 0.7).sum().backward()
    assert torch.equal(weight.grad, want) and not weight.main_grad.any()
    assert not hasattr(weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("needs_weight", [True, False])
def test_weight_gradient_costs_nothing_where_it_is_not_wanted(needs_weight: bool) -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(needs_weight)
    value = linear_logprobs(hidden, weight, Targets(targets), 1.0).sum()
    with Recorder() as recorder:
        value.backward()
    assert ((V, D) in recorder.shapes) == needs_weight
    assert (weight.grad is not None) == needs_weight
    assert hidden.grad is not None


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs._ENTRIES_PER_CHUNK, "cpu", 2 * V)
    monkeypatch.setitem(logprobs._KEPT_ENTRIES, "cpu", 0)
    hidden, weight, targets = inputs()
    with Recorder() as recorder:
        linear_logprobs(hidden, weight, Targets(targets), 0.7).sum().backward()
    assert (2, V) in recorder.shapes
    # Every other tensor is no larger than the weight, or its transpose.
    assert max(math.prod(shape) for shape in recorder.shapes) == V * D < M * V


@pytest.mark.parametrize("num_kept", [M * V, M * V - 1])
def test_few_logits_are_kept_and_then_not_computed_again(num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs._KEPT_ENTRIES, "cpu", num_kept)
    hidden, weight, targets = inputs()
    value = linear_logprobs(hidden, weight, Targets(targets), 0.7).sum()
    with Recorder() as recorder:
        value.backward()
    # W^T to compute logits from, and [M, V] gradients of logits.
    assert ((D, V) not in recorder.shapes) == (num_kept == M * V)
    assert (M, V) in recorder.shapes


def test_saved_tensors_are_left_alone() -> None:
    hidden, weight, targets = inputs()
    copies = [tensor.detach().clone() for tensor in (hidden, weight, targets)]
    value = linear_logprobs(hidden, weight, Targets(targets), 0.7).pow(2).sum()
    first = torch.autograd.grad(value, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(value, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((hidden, weight, targets), copies, strict=True))


def _rank(rank: int, directory: Path) -> None:
    """Computes with half of the vocabulary; saves the outputs and the gradients.

    The hidden states' gradients are summed over the ranks, as the caller of linear_logprobs would do.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    hidden, weight, targets = inputs()
    part = weight.detach()[rank * V // 2 : (rank + 1) * V // 2].clone().requires_grad_()
    got = linear_logprobs(hidden, part, Targets(targets), 0.7, dist.group.WORLD)
    grad_hidden, grad_part = torch.autograd.grad(mixed(got), (hidden, part))
    dist.all_reduce(grad_hidden)
    torch.save([got.detach(), grad_hidden, grad_part], directory / f"{rank}.pt")
    mask_MK = sampling_masks(targets)
    cut = linear_logprobs(hidden, part, Targets(targets, mask_MK), 0.7, dist.group.WORLD)
    grad_hidden, grad_part = torch.autograd.grad(mixed(cut), (hidden, part))
    dist.all_reduce(grad_hidden)
    torch.save([cut.detach(), grad_hidden, grad_part], directory / f"{rank}-kept.pt")
    also = Targets(targets, others_MJ=others(targets), top_k=TopK(TOP_K, V - 5))
    more = linear_logprobs(hidden, part, also, 0.7, dist.group.WORLD)
    split = -2 * TOP_K - 1
    more = torch.cat([without_padding(more[:split], others(targets)), more[split:].detach()])
    grad_hidden, grad_part = torch.autograd.grad(mixed(more), (hidden, part))
    dist.all_reduce(grad_hidden)
    torch.save([more.detach(), grad_hidden, grad_part], directory / f"{rank}-others.pt")
    dist.destroy_process_group()


def test_split_vocabulary_gives_the_same(tmp_path: Path) -> None:
    ranks = [forks.Process(target=_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    hidden, weight, targets = inputs()
    whole = linear_logprobs(hidden, weight, Targets(targets), 0.7)
    assert_split([tmp_path / f"{rank}.pt" for rank in range(2)], whole, hidden, weight)
    over_kept = plain_over_masks(hidden, weight, targets, sampling_masks(targets))
    assert_split([tmp_path / f"{rank}-kept.pt" for rank in range(2)], over_kept, hidden, weight)
    scores_MV = torch.log_softmax(hidden.detach() @ weight.detach().T / 0.7, -1)
    values, tokens = scores_MV[:, : V - 5].topk(TOP_K)
    with_others = plain_with_others(hidden, weight, targets, others(targets))
    with_others = torch.cat([with_others, values.T, rest(scores_MV, tokens), tokens.T])
    assert_split([tmp_path / f"{rank}-others.pt" for rank in range(2)], with_others, hidden, weight)


def assert_split(files: list[Path], whole: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Compares what the ranks left with `whole`, which one process has computed from `hidden` and `weight`."""
    values, hidden_gradients, weight_gradients = zip(*map(torch.load, files), strict=True)
    want_hidden, want_weight = torch.autograd.grad(mixed(whole), (hidden, weight))
    for got in values:
        torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-12)
    for got in hidden_gradients:
        torch.testing.assert_close(got, want_hidden, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat(weight_gradients), want_weight, rtol=1e-11, atol=1e-11)
