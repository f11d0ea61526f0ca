"""Tests that loss and gradient of a mini-batch, cut into micro-batches in any way, equal those of plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.loss import LossConfig
from services.trainer.losses.kinds import covariance, covariance_sums
from services.trainer.losses.policy import Totals, policy_loss
from tests.trainer.plain_grpo import batch_loss

# The bounds are so narrow that many of the tokens meet each of them.
KINDS: list[dict[str, Any]] = [
    {"kind": "grpo", "clip_low": 0.1, "clip_high": 0.3},
    {"kind": "ppo", "clip_dual": 1.5},
    {"kind": "gspo", "gspo": {"clip_low": 0.05, "clip_high": 0.1}},
    {"kind": "gmpo", "gmpo": {"clip_low": 0.2, "clip_high": 0.3}},
    {"kind": "cispo", "cispo": {"min_ratio": 0.8, "max_ratio": 1.4}},
    {"kind": "sapo"},
    {"kind": "clip_cov", "clip_cov": {"min_covariance": 0.2}},
    {"kind": "kl_cov", "kl_cov": {"min_covariance": 0.2}},
    {"kind": "dppo", "dppo": {"threshold": 0.03}},
    {"kind": "dppo", "dppo": {"threshold": 0.01, "divergence": "kl"}},
    {"kind": "reinforce"},
    {"kind": "sft"},
]
CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"weight": "token", "weight_cap": 1.2},
    {"weight": "sequence", "weight_cap": 1.2},
    {"weight": "token", "weight_cap": 1.5, "token_mask": (0.7, 1.5)},
    {"geometric_mask": (0.9, 1.1)},
    {"veto": 0.6, "weight": "sequence"},
]
# Under weights that differ within a sequence, a token form has another gradient than its sequence form.
CORRECTIONS_OF: dict[str, list[dict[str, Any]]] = {
    **{kind: [CORRECTIONS[0], CORRECTIONS[2], *CORRECTIONS[4:]] for kind in ("gspo", "gmpo")},
    "sft": [{}],
}
MEANS: list[dict[str, Any]] = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "seq_mean_token_sum_norm", "norm_tokens": 7},
]
COLUMNS = ("advantages", "old_logprobs", "behavior_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Batch:
    """Holds sequences, each as its log-probabilities and entropy, which need gradients, and its columns."""

    sequences: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]

    @property
    def totals(self) -> Totals:
        counts = [int(columns["loss_mask"].sum()) for _, _, columns in self.sequences]
        return Totals(sum(counts), sum(count > 0 for count in counts))

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        leaves = [leaf for logprobs, entropy, _ in self.sequences for leaf in (logprobs, entropy)]
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6))
    if not any(map(any, masks)):
        masks[0][0] = True
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sequences = []
    for mask in masks:
        random = torch.randn(7, len(mask), generator=generator, dtype=torch.float64)
        columns = {name: -1.5 + 0.3 * random[i] for i, name in enumerate(COLUMNS)}
        # A sequence has one advantage, as in gspo's paper; what masked tokens hold must not matter.
        columns["advantages"] = random[0, :1].expand(len(mask))
        columns["loss_mask"] = torch.tensor(mask, dtype=torch.float64)
        columns["old_logprobs"] = torch.where(columns["loss_mask"] > 0, columns["old_logprobs"], -1e4)
        columns["completion_length"] = columns["loss_mask"].sum().expand(len(mask))
        sequences.append(((-1.5 + 0.3 * random[5]).requires_grad_(), random[6].clone().requires_grad_(), columns))
    return Batch(sequences)


@st.composite
def splits(draw: st.DrawFn, num_sequences: int) -> list[list[int]]:
    order = draw(st.permutations(range(num_sequences)))
    ends = sorted(draw(st.sets(st.integers(1, num_sequences))) | {num_sequences})
    return [list(order[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def in_microbatches(
    batch: Batch, microbatches: Sequence[Sequence[int]], config: LossConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    built = []
    for microbatch in microbatches:
        parts = [batch.sequences[i] for i in microbatch]
        outputs = torch.stack([torch.cat([part[k] for part in parts]) for k in (0, 1)])
        columns = {name: torch.cat([columns[name] for _, _, columns in parts]) for name in parts[0][2]}
        built.append((outputs, columns, tuple(len(logprobs) for logprobs, _, _ in parts)))
    if config.needs_covariance:
        means = covariance_sums([columns for _, columns, _ in built]) / batch.totals.num_tokens
        for _, columns, _ in built:
            columns["covariance"] = covariance(columns, means)
    results = [policy_loss(*microbatch, batch.totals, config) for microbatch in built]
    names = results[0][1].keys()
    return sum(loss for loss, _ in results), {name: sum(metrics[name] for _, metrics in results) for name in names}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["kind"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_loss_of_any_split_is_the_plain_one(kind: dict[str, Any], data: st.DataObject) -> None:
    config = LossConfig(
        **kind,
        **data.draw(st.sampled_from(MEANS)),
        correction=data.draw(st.sampled_from(CORRECTIONS_OF.get(kind["kind"], CORRECTIONS))),
        kl_coef=data.draw(st.sampled_from([0.0, 0.2])),
        kl_kind=data.draw(st.sampled_from(["k1", "k2", "k3", "abs"])),
        entropy_coef=data.draw(st.sampled_from([0.0, 0.05])),
    )
    batch = data.draw(batches())
    microbatches = data.draw(splits(len(batch.sequences)))
    want = batch_loss(batch.sequences, config)
    want_gradients = batch.gradients(want)
    whole, whole_metrics = in_microbatches(batch, [range(len(batch.sequences))], config)
    split, split_metrics = in_microbatches(batch, microbatches, config)
    # These are some 100 float64 operations on numbers of size 1 to 10.
    for loss in (whole, split):
        assert loss.item() == pytest.approx(want.item(), rel=1e-12, abs=1e-12)
        torch.testing.assert_close(batch.gradients(loss), want_gradients, rtol=1e-12, atol=1e-12)
    assert split_metrics["loss"].item() == pytest.approx(split.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split_metrics, whole_metrics, rtol=1e-12, atol=1e-12)


def test_the_comparison_sees_bounds_bind() -> None:
    """Checks that some tokens meet each bound; otherwise all kinds above would be compared where they are the same."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(30):
        random = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        columns = {name: -1.5 + 0.3 * random[i] for i, name in enumerate(COLUMNS)}
        columns |= {"advantages": random[0, :1].expand(4), "loss_mask": torch.ones(4, dtype=torch.float64)}
        columns["completion_length"] = columns["loss_mask"].sum().expand(4)
        sequences.append((-1.5 + 0.3 * random[5], random[6], columns))
    batch = Batch(sequences)
    for kind in KINDS:
        _, metrics = in_microbatches(batch, [range(30)], LossConfig(**kind))
        for name in ("clip_fraction", "clip_dual_fraction", "covariance_fraction"):
            assert name not in metrics or 0.02 < metrics[name] < 0.98, (kind, name)
    for correction in CORRECTIONS[1:]:
        _, metrics = in_microbatches(batch, [range(30)], LossConfig(correction=correction))
        assert 0.02 < metrics["correction_masked"] + metrics["correction_truncated"] < 0.98, correction
