"""Tests the values of `old_logprobs`, and the difference between engine and trainer, through the FSDP backend."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from services.common.errors import PreconditionFailed, Reason
from tests.support import raises
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import SMALL, TEMPERATURE, Harness, config
from tests.trainer.harness_processes import few_of
from tests.trainer.loss_harness import HALVES, LOSSES, samples

GAPS = [("recompute", True), ("engine", False), ("on_policy", True)]


@pytest.mark.parametrize(("kind", "forwards"), [("recompute", 1), ("engine", 0), ("on_policy", 0)])
def test_old_logprobs(harness: Harness, kind: str, forwards: int) -> None:
    harness.open("untied", SMALL | {"num_minibatches": 2, "loss": {"old_logprobs": kind}})
    table, calls = samples(), 0
    before = [np.float64(row) for row in harness.logprobs(table)]
    forward = harness.backend.forward

    def counting_forward(*args: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        return forward(*args, **more)

    harness.backend.forward = counting_forward
    metrics = harness.train(table)
    assert calls == forwards
    rows = table.select(["group", "loss_mask", "logprobs"]).to_pylist()
    log_weights = [
        (trainer - row["logprobs"])[np.array(row["loss_mask"])]
        for row, trainer in zip(rows, before, strict=True)
        # Without the forward, only the first mini-batch, of groups 0 and 1, is scored before anything is applied.
        if kind == "recompute" or row["group"] < 2
    ]
    logs = np.concatenate(log_weights)
    assert metrics["logprob_diff_mean"] == pytest.approx(np.abs(logs).mean(), rel=1e-5)
    assert metrics["logprob_diff_max"] == pytest.approx(np.abs(logs).max(), rel=1e-5)
    assert metrics["logprob_diff_kl"] == pytest.approx((np.exp(logs) - 1 - logs).mean(), rel=1e-5)
    ess = np.exp(logs).sum() ** 2 / (len(logs) * (np.exp(logs) ** 2).sum())
    assert metrics["logprob_diff_ess"] == pytest.approx(ess, rel=1e-5)
    if kind == "on_policy":
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    else:
        assert abs(metrics["ratio_mean"] - 1) > 1e-3


def test_engine_is_the_denominator_of_the_first_update(harness: Harness) -> None:
    harness.open("untied", {"loss": {"old_logprobs": "engine"}})
    table = samples()
    before = harness.logprobs(table)
    masks, engine = table["loss_mask"].to_pylist(), table["logprobs"].to_pylist()
    ratios = [np.exp(np.float64(b) - e)[np.array(m)] for b, e, m in zip(before, engine, masks, strict=True)]
    assert harness.train(table)["ratio_mean"] == pytest.approx(np.concatenate(ratios).mean(), rel=1e-5)


@pytest.mark.parametrize(("kind", "is_trained"), few_of(GAPS, ["recompute", "engine", "on_policy"], [True, False]))
def test_gap_is_that_of_trained_tokens(harness: Harness, kind: str, is_trained: bool) -> None:
    harness.open("untied", {"max_logprob_diff": 3.0, "num_minibatches": 2, "loss": {"old_logprobs": kind}})
    table, before = samples(), harness.parameters()
    index = table.schema.get_field_index("logprobs")
    rows = zip(table["logprobs"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    far = [[-90.0 if kept == is_trained else x for x, kept in zip(row, mask, strict=True)] for row, mask in rows]
    table = table.set_column(index, table.schema.field(index), pa.array(far, pa.list_(pa.float32())))
    if not is_trained:
        assert np.isfinite(list(harness.train(table).values())).all()
        return
    with raises(PreconditionFailed, reason=Reason.LOGPROB_DIFF):
        harness.train(table)
    assert all(torch.equal(tensor, before[name]) for name, tensor in harness.parameters().items())


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.long), 2])
def test_epochs_pass_over_the_batch_again(harness: Harness, trainer_files: Path, minibatches: int) -> None:
    """Checks that the old policy stays the one before the batch, so that the second epoch meets the clips."""
    changes = SMALL | HALVES | {"loss": LOSSES["grpo"], "num_minibatches": minibatches}
    harness.open("untied", changes | {"num_epochs": 3})
    before = harness.parameters()
    metrics, weights = harness.train(samples()), harness.parameters()
    directory, rows = trainer_files / "models" / "untied", samples().to_pylist()
    want = plain_grpo.update(directory, rows, config(changes | {"num_epochs": 3}), TEMPERATURE)
    once = plain_grpo.update(directory, rows, config(changes), TEMPERATURE)
    for name, start in before.items():
        moved = (want.weights[name] - start).abs().max()
        assert (weights[name] - want.weights[name]).abs().max() <= 1e-4 * moved, name
        assert (once.weights[name] - want.weights[name]).abs().max() > 0.1 * moved, name
    assert metrics["loss"] == pytest.approx(want.metrics["loss"], rel=1e-4)
    assert abs(metrics["ratio_mean"] - 1) > 1e-3


def test_engine_and_trainer_are_compared_before_the_first_epoch(harness: Harness) -> None:
    changes = SMALL | HALVES | {"loss": LOSSES["grpo"]}
    gaps = []
    for num_epochs in (1, 3):
        harness.open("untied", changes | {"num_epochs": num_epochs})
        gaps.append(harness.train(samples())["logprob_diff_mean"])
    assert gaps[0] == gaps[1]


def test_sft_needs_neither_advantages_nor_an_engine(harness: Harness) -> None:
    harness.open("untied", SMALL | {"num_minibatches": 2, "loss": {"kind": "sft"}, "optim": {"lr": 1e-9}})
    table = samples()
    before, masks = harness.logprobs(table), table["loss_mask"].to_pylist()
    means = [
        -np.concatenate([np.float64(before[row])[np.array(masks[row])] for row in half]).mean()
        for half in (range(6), range(6, 12))
    ]
    nothing = [[0.0] * len(row) for row in table["tokens"].to_pylist()]
    for name, values in (("logprobs", nothing), ("advantages", [None] * 12)):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, pa.list_(pa.float32())))
    metrics = harness.train(table)
    assert metrics["loss"] == pytest.approx(np.mean(means), rel=1e-5)
    assert not any(name.startswith("logprob_diff") for name in metrics)
