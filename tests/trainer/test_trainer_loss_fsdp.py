"""Losses through the FSDP backend: the same gradient for any split, plain torch's, and what `old_logprobs` means."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from services.common.errors import PreconditionFailed
from tests.trainer import loss_lab, plain_grpo
from tests.trainer.fsdp_lab import SMALL, TEMPERATURE, Lab, config, read
from tests.trainer.loss_lab import UPDATES, samples

# As in test_trainer_fsdp: float32 sums over some 70 tokens, in another order, after one update has passed its rounding
# to the next. A count of one rank in place of all would change a gradient by some 10 %.
SPLIT_TOLERANCE = 5e-6
REFERENCE_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def loss_worlds(trainer_files: Path, lab: Lab) -> dict[int, Path]:
    """Results of loss_lab by world size."""
    results = {world: trainer_files / f"loss-world{world}" for world in (1, 2)}
    for directory in results.values():
        directory.mkdir()
    ranks = [
        subprocess.Popen([sys.executable, "-m", "tests.trainer.loss_lab", str(rank), "2", str(results[2])])
        for rank in range(2)
    ]
    try:
        loss_lab.run_all(lab, results[1])
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return results


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor within `tolerance` of its own largest entry."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        gap = (got[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp_min(1e-12)
        assert gap <= tolerance, f"{name}: {gap:.3g}"


@pytest.mark.parametrize("name", UPDATES)
def test_gradient_is_the_same_for_any_split(loss_worlds: dict[int, Path], name: str) -> None:
    want, want_metrics = read(loss_worlds[1], f"{name}-large")
    for world, size in ((1, "small"), (2, "large"), (2, "small")):
        got, metrics = read(loss_worlds[world], f"{name}-{size}")
        assert_close(got, want, SPLIT_TOLERANCE)
        assert metrics == pytest.approx(want_metrics, rel=SPLIT_TOLERANCE, abs=SPLIT_TOLERANCE)


@pytest.mark.parametrize("name", ["dual", "gspo", "cispo"])
def test_gradient_is_that_of_plain_torch(loss_worlds: dict[int, Path], trainer_files: Path, name: str) -> None:
    rows = samples().to_pylist()
    want = plain_grpo.update(trainer_files / "models" / "untied", rows, config(UPDATES[name]), TEMPERATURE)
    gradients, metrics = read(loss_worlds[2], f"{name}-small")
    assert_close(gradients, want.gradients, REFERENCE_TOLERANCE)
    assert metrics["loss"] == pytest.approx(want.metrics["loss"], rel=REFERENCE_TOLERANCE, abs=REFERENCE_TOLERANCE)


def test_the_comparison_sees_bounds_bind(loss_worlds: dict[int, Path]) -> None:
    shares = {
        "dual": ["clip_fraction", "clip_dual_fraction"],
        "gspo": ["clip_fraction", "correction_masked"],
        "cispo": ["clip_fraction", "correction_masked", "correction_truncated"],
        "clip_cov": ["clip_fraction", "covariance_fraction"],
    }
    for name, metrics in shares.items():
        measured = read(loss_worlds[2], f"{name}-small")[1]
        assert all(0 < measured[metric] < 1 for metric in metrics), (name, measured)


@pytest.mark.parametrize(("kind", "forwards"), [("recompute", 1), ("engine", 0), ("on_policy", 0)])
def test_old_logprobs(lab: Lab, kind: str, forwards: int) -> None:
    lab.open("untied", SMALL | {"num_minibatches": 2, "loss": {"old_logprobs": kind}})
    table, calls = samples(), 0
    before = [np.float64(row) for row in lab.logprobs(table)]
    forward = lab.backend.forward

    def counted(*args: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        return forward(*args, **more)

    lab.backend.forward = counted
    metrics = lab.train(table)
    assert calls == forwards
    rows = table.select(["group", "loss_mask", "logprobs"]).to_pylist()
    log_weights = [
        (trainer - row["logprobs"])[np.array(row["loss_mask"])]
        for row, trainer in zip(rows, before, strict=True)
        # Without the forward only the first mini-batch, of groups 0 and 1, is known before anything is applied.
        if kind == "recompute" or row["group"] < 2
    ]
    logs = np.concatenate(log_weights)
    assert metrics["logprob_gap_mean"] == pytest.approx(np.abs(logs).mean(), rel=1e-5)
    assert metrics["logprob_gap_max"] == pytest.approx(np.abs(logs).max(), rel=1e-5)
    assert metrics["logprob_gap_kl"] == pytest.approx((np.exp(logs) - 1 - logs).mean(), rel=1e-5)
    ess = np.exp(logs).sum() ** 2 / (len(logs) * (np.exp(logs) ** 2).sum())
    assert metrics["logprob_gap_ess"] == pytest.approx(ess, rel=1e-5)
    if kind == "on_policy":
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    else:
        assert abs(metrics["ratio_mean"] - 1) > 1e-3


def test_engine_is_the_denominator_of_the_first_update(lab: Lab) -> None:
    lab.open("untied", {"loss": {"old_logprobs": "engine"}})
    table = samples()
    before = lab.logprobs(table)
    masks, engine = table["loss_mask"].to_pylist(), table["logprobs"].to_pylist()
    ratios = [np.exp(np.float64(b) - e)[np.array(m)] for b, e, m in zip(before, engine, masks, strict=True)]
    assert lab.train(table)["ratio_mean"] == pytest.approx(np.concatenate(ratios).mean(), rel=1e-5)


@pytest.mark.parametrize("kind", ["recompute", "engine", "on_policy"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_gap_is_that_of_trained_tokens(lab: Lab, kind: str, is_trained: bool) -> None:
    lab.open("untied", {"max_logprob_gap": 3.0, "num_minibatches": 2, "loss": {"old_logprobs": kind}})
    table, before = samples(), lab.parameters()
    index = table.schema.get_field_index("logprobs")
    rows = zip(table["logprobs"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    far = [[-90.0 if kept == is_trained else x for x, kept in zip(row, mask, strict=True)] for row, mask in rows]
    table = table.set_column(index, table.schema.field(index), pa.array(far, pa.list_(pa.float32())))
    if not is_trained:
        assert np.isfinite(list(lab.train(table).values())).all()
        return
    with pytest.raises(PreconditionFailed, match="nothing was applied"):
        lab.train(table)
    assert all(torch.equal(tensor, before[name]) for name, tensor in lab.parameters().items())


def test_sft_needs_neither_advantages_nor_an_engine(lab: Lab) -> None:
    lab.open("untied", SMALL | {"num_minibatches": 2, "loss": {"kind": "sft"}, "optim": {"lr": 1e-9}})
    table = samples()
    before, masks = lab.logprobs(table), table["loss_mask"].to_pylist()
    means = [
        -np.concatenate([np.float64(before[row])[np.array(masks[row])] for row in half]).mean()
        for half in (range(6), range(6, 12))
    ]
    nothing = [[0.0] * len(row) for row in table["tokens"].to_pylist()]
    for name, values in (("logprobs", nothing), ("advantages", [None] * 12)):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, pa.list_(pa.float32())))
    metrics = lab.train(table)
    assert metrics["loss"] == pytest.approx(np.mean(means), rel=1e-5)
    assert not any(name.startswith("logprob_gap") for name in metrics)
