"""Tests the critic's loss by hand, by finite differences, and over any split."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.loss import ValueLossConfig
from services.trainer.losses.policy import Totals, explained_variance, value_loss


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# value, value before the batch, return -> loss and gradient with value_clip 0.2
CASES = [
    (1.0, 1.0, 3.0, 2.0, -2.0),
    (1.1, 1.0, 3.0, 1.9**2 / 2, -1.9),
    (1.5, 1.0, 3.0, 1.8**2 / 2, 0.0),  # went far enough toward the return
    (0.5, 1.0, 3.0, 2.5**2 / 2, -2.5),  # went away from it
    (1.5, 1.0, 1.3, 0.2**2 / 2, 0.2),  # past it
    (0.7, 1.0, 1.0, 0.3**2 / 2, -0.3),
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "gradient"), CASES)
def test_clipped_error(value: float, old: float, target: float, loss: float, gradient: float) -> None:
    values = column(value).requires_grad_()
    columns = {"values": column(old), "returns": column(target), "loss_mask": column(1), "completion_length": column(1)}
    got, metrics = value_loss(values, columns, Totals(1, 1), ValueLossConfig(value_clip=0.2))
    got.backward()
    assert (got.item(), values.grad.item()) == pytest.approx((loss, gradient), rel=1e-14)
    assert metrics["clip_fraction"] == (abs(value - old) > 0.2 and abs(value - target) < abs(old - target) - 0.2)


def test_without_clip_no_old_values_are_read() -> None:
    values = column(1.5).requires_grad_()
    columns = {"returns": column(3.0), "loss_mask": column(1), "completion_length": column(1)}
    loss, metrics = value_loss(values, columns, Totals(1, 1), ValueLossConfig(value_clip=None))
    loss.backward()
    assert (loss.item(), values.grad.item(), metrics["clip_fraction"].item()) == (1.5**2 / 2, -1.5, 0)


def batch(seed: int, masks: list[list[bool]]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for mask in masks:
        now, old, returns = torch.randn(3, len(mask), generator=generator, dtype=torch.float64)
        is_trained = torch.tensor(mask, dtype=torch.float64)
        columns = {
            "values": old,
            "returns": returns,
            "loss_mask": is_trained,
            "completion_length": is_trained.sum().expand(len(mask)),
        }
        sequences.append({"now": now, **columns})
    return sequences


def totals(sequences: list[dict[str, torch.Tensor]]) -> Totals:
    counts = [int(columns["loss_mask"].sum()) for columns in sequences]
    return Totals(sum(counts), sum(count > 0 for count in counts))


def joined(sequences: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([columns[name] for columns in sequences]) for name in sequences[0]}


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradient_is_the_finite_difference(clip: float | None) -> None:
    sequences = batch(0, [[True, False, True], [False], [True] * 4])
    columns, config = joined(sequences), ValueLossConfig(value_clip=clip, aggregation="seq_mean_token_mean")
    values = columns.pop("now").requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, columns, totals(sequences), config)[0], (values,))


MEANS: list[dict[str, Any]] = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "seq_mean_token_sum_norm", "norm_tokens": 7},
]


@settings(max_examples=40, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=2, max_size=6).filter(
        lambda masks: any(map(any, masks))
    ),
    seed=st.integers(0, 2**31),
    mean=st.sampled_from(MEANS),
    data=st.data(),
)
def test_loss_of_any_split_is_the_plain_one(
    masks: list[list[bool]], seed: int, mean: dict[str, Any], data: st.DataObject
) -> None:
    sequences, config = batch(seed, masks), ValueLossConfig(value_clip=0.3, **mean)
    count = totals(sequences)
    cut = data.draw(st.integers(1, len(sequences) - 1))
    microbatches = [joined(part) for part in (sequences[:cut], sequences[cut:])]
    results = [value_loss(columns["now"], columns, count, config) for columns in microbatches]
    want = 0.0
    for columns in sequences:
        errors = []
        for value, old, target, is_trained in zip(
            *(columns[name].tolist() for name in ("now", "values", "returns", "loss_mask")), strict=True
        ):
            near = old + min(max(value - old, -0.3), 0.3)
            errors += [max((value - target) ** 2, (near - target) ** 2) / 2] if is_trained else []
        share = {
            "token_mean": 1 / count.num_tokens,
            "seq_mean_token_mean": 1 / (count.num_sequences * max(len(errors), 1)),
            "seq_mean_token_sum": 1 / count.num_sequences,
            "seq_mean_token_sum_norm": 1 / (count.num_sequences * 7),
        }[mean["aggregation"]]
        want += sum(errors) * share
    assert sum(loss.item() for loss, _ in results) == pytest.approx(want, rel=1e-12)
    summed = {name: sum(metrics[name].item() for _, metrics in results) for name in results[0][1]}
    assert summed["loss"] == pytest.approx(want, rel=1e-12)
    whole = joined(sequences)
    is_trained = whole["loss_mask"] > 0
    returns, left = whole["returns"][is_trained], (whole["returns"] - whole["now"])[is_trained]
    if len(returns) > 1:
        exact = 1 - (left.var(correction=0) / returns.var(correction=0)).item()
        assert explained_variance(summed) == pytest.approx(exact, rel=1e-9, abs=1e-9)


def test_explained_variance_of_known_critics() -> None:
    columns = {"returns": column(1, 2, 3, 6), "loss_mask": torch.ones(4), "completion_length": torch.full((4,), 4.0)}
    for values, want in (([1, 2, 3, 6], 1.0), ([3, 3, 3, 3], 0.0), ([5, 4, 3, 0], -3.0), ([11, 12, 13, 16], 1.0)):
        _, metrics = value_loss(column(*values), columns, Totals(4, 1), ValueLossConfig(value_clip=None))
        got = explained_variance({name: value.item() for name, value in metrics.items()})
        assert math.isclose(got, want, abs_tol=1e-12)
    constant = columns | {"returns": column(2, 2, 2, 2)}
    _, metrics = value_loss(column(1, 2, 3, 4), constant, Totals(4, 1), ValueLossConfig(value_clip=None))
    assert explained_variance({name: value.item() for name, value in metrics.items()}) == 0.0
    columns = {"returns": torch.full((12345,), 0.9999), "loss_mask": torch.ones(12345)}
    columns["completion_length"] = torch.full((12345,), 12345.0)
    _, metrics = value_loss(torch.zeros(12345), columns, Totals(12345, 1), ValueLossConfig(value_clip=None))
    assert explained_variance({name: value.item() for name, value in metrics.items()}) == 0.0
