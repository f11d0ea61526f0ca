"""Tests that an episode counts once: however it is split into segments, its tokens weigh the same."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from services.common import batches as blocks_module
from services.common.batches import SAMPLE_SCHEMA, BlockCutter, begins_of_samples, blocks_of, trained_tokens
from services.common.config.advantage import AdvantageConfig
from services.common.config.loss import LossConfig
from services.common.errors import InvalidInput
from services.coordinator.rl.advantages import ESTIMATORS, compute_advantages
from services.coordinator.rl.advantages import samples as advantage_samples
from services.coordinator.rl.metrics import batch_metrics
from services.trainer import samples as trainer_samples
from services.trainer.losses.kinds import Totals, token_weights
from services.trainer.losses.policy import policy_loss
from services.trainer.samples import check_groups, check_samples, trained_of_samples
from services.trainer.updates.packing import build_microbatch
from tests.agents.in_process import caught
from tests.support import raises
from tests.trainer.losses.test_split import KINDS, MEANS

TURNS = [[11, 12], [13], [14, 15, 16], [17], [18, 19], [20], [21, 22]]
REWARDS = [[1.0, 0.0, 0.25], [0.0, 0.5, 0.5]]  # of the samples of two groups
# What kinds of advantage read, where it is not left out.
READ = {"gae": {"gamma": 0.9}, "per_turn": {"gamma": 0.9}, "gdpo": {"components": {"correct": 1.0}}}


def episode(group: int, sample: int, num_segments: int) -> list[dict[str, Any]]:
    """Returns the rows of an episode of seven turns, dealt to segments in their order.

    Each segment but the first repeats the turn before it, which is not trained there.
    """
    rows = []
    for segment, part in enumerate(np.array_split(np.arange(len(TURNS)), num_segments)):
        turns = [TURNS[turn] for turn in part]
        repeated = [TURNS[part[0] - 1]] if segment else []
        tokens, mask, begins, ends = list[int](), list[bool](), list[int](), list[int]()
        for turn, is_trained in [*((turn, False) for turn in repeated), *((turn, True) for turn in turns)]:
            begins.append(len(tokens))
            tokens += turn
            mask += [is_trained] * len(turn)
            ends.append(len(tokens))
            tokens.append(7)  # what the agent says
            mask.append(False)
        logprobs = [-0.1 * (token % 5) for token in tokens]
        rows.append(
            {
                **{"prompt_id": f"p{group}", "group": group, "sample": sample, "segment": segment, "seed": 1},
                **{"prompt_tokens": [5, 6 + segment], "tokens": tokens, "logprobs": logprobs, "loss_mask": mask},
                **{
                    "ref_logprobs": [0.5 * one for one in logprobs],
                    "teacher_logprobs": [0.7 * one for one in logprobs],
                },
                **{"values": [0.01 * token for token in tokens]},
                **{"reward": REWARDS[group][sample], "components": [("correct", REWARDS[group][sample])]},
                **{"baseline": 0.3, "finish_reason": "stop"},
                **{"policy_version": 0, "policy_digest": "d", "scorer": "s", "environment": "agent 1"},
                **{"turn_begins": begins, "turn_ends": ends, "turn_rewards": [0.0] * len(begins)},
            }
        )
    return rows


def batch(num_segments: int) -> pa.Table:
    """Returns two groups of three episodes, of which only the first is split."""
    rows = [
        row
        for group in range(2)
        for sample in range(3)
        for row in episode(group, sample, num_segments if (group, sample) == (0, 0) else 1)
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def per_trained_token(table: pa.Table, values: list[list[float]]) -> list[float]:
    masks = table["loss_mask"].to_pylist()
    return [v for row, mask in zip(values, masks, strict=True) for v, is_on in zip(row, mask, strict=True) if is_on]


@pytest.mark.parametrize("kind", sorted(ESTIMATORS.keys() - {"python"}))
@pytest.mark.parametrize("whitening", ["none", "batch", "group"])
def test_advantages_do_not_depend_on_the_split(kind: str, whitening: str):
    whitening = "none" if kind == "distill" else whitening
    config = AdvantageConfig(kind=kind, whiten=whitening, **READ.get(kind, {}))
    whole, *splits = (compute_advantages(batch(number), config) for number in (1, 2, 7))
    expected = per_trained_token(whole, whole["advantages"].to_pylist())
    for split in splits:
        assert per_trained_token(split, split["advantages"].to_pylist()) == pytest.approx(expected, rel=1e-6, abs=1e-7)
        outside = [v for row, mask in zip(split["advantages"].to_pylist(), split["loss_mask"].to_pylist(), strict=True)
                   for v, is_on in zip(row, mask, strict=True) if not is_on]  # fmt: skip
        assert not any(outside)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
def test_weights_of_tokens_in_the_loss_do_not_depend_on_the_split(aggregation: str):
    norm = {"norm_tokens": 4} if aggregation.endswith("norm") else {}
    config, weights = LossConfig(aggregation=aggregation, **norm), []
    for number in (1, 2, 7):
        table = batch(number)
        narrow = table.append_column("trained_tokens", trained_of_samples(table))
        columns = build_microbatch(narrow).columns
        begins = begins_of_samples(table)
        counts = np.add.reduceat(trained_tokens(table), begins)
        totals = Totals(int(trained_tokens(table).sum()), len(begins))
        of_tokens = token_weights(config, columns, totals)
        weights.append(of_tokens[columns["loss_mask"] > 0].tolist())
        assert counts.tolist() == [sum(map(len, TURNS))] * 6
    assert weights[0] == weights[1] == weights[2]


def test_metrics_and_blocks_count_an_episode_once():
    whole, split = batch(1), batch(7)
    one, other = batch_metrics(whole), batch_metrics(split)
    for name in ("reward/mean", "reward/std", "reward/mixed_groups", "batch/samples", "completion/truncated"):
        assert one[name] == other[name]
    assert (other["agent/segments_mean"], one["agent/segments_mean"]) == (2.0, 1.0)
    assert one["agent/repeated_share"] == 0 and other["agent/repeated_share"] > 0
    blocks = blocks_of(split, BlockCutter(1))
    assert [block.num_rows for block in blocks] == [9, 3], "a group is never cut"


def test_the_trainer_takes_segments_and_refuses_what_is_none():
    table = batch(7)
    check_samples(table, vocab_size=100, routed_experts=None)
    rows = table.to_pylist()
    for name, change in (
        ("sample", lambda: rows[:1] + rows[:1] + rows[1:]),
        ("segment", lambda: [rows[1], rows[0], *rows[2:]]),
        ("segment", lambda: [*rows[:-1], {**rows[-1], "segment": None}]),
        ("reward", lambda: [rows[0], {**rows[1], "reward": 0.9}, *rows[2:]]),
    ):
        with raises(InvalidInput, field=name):
            changed = pa.Table.from_pylist(change(), schema=SAMPLE_SCHEMA)
            check_samples(changed, vocab_size=100, routed_experts=None)
            check_groups(changed)


def gradient(table: pa.Table, config: LossConfig) -> torch.Tensor:
    """Returns the gradient of the loss of a batch for a policy that has one parameter for each token of an episode."""
    narrow = table.append_column("trained_tokens", trained_of_samples(table))
    microbatch = build_microbatch(narrow)
    columns, lengths = dict(microbatch.columns), microbatch.completion_lengths
    episodes = [3 * row["group"] + row["sample"] for row in table.select(["group", "sample"]).to_pylist()]
    at = torch.repeat_interleave(torch.tensor(episodes), torch.tensor(lengths)) * 100 + microbatch.targets_N
    policy = (-1.5 + 0.3 * torch.randn(600, generator=torch.Generator().manual_seed(0))).double().requires_grad_()
    drawn = -1.5 + 0.3 * torch.randn(2, 600, generator=torch.Generator().manual_seed(1))
    columns["old_logprobs"], columns["behavior_logprobs"] = drawn[0][at], drawn[1][at]
    columns["covariance"] = drawn.prod(0)[at]
    totals = Totals(int(trained_tokens(table).sum()), len(blocks_module.begins_of_samples(table)))
    loss, _ = policy_loss(torch.stack([policy[at], policy[at].exp()]), columns, lengths, totals, config)
    return torch.autograd.grad(loss, policy)[0]


ADVANTAGES = [
    *({"kind": kind, **READ.get(kind, {})} for kind in sorted(ESTIMATORS.keys() - {"python"})),
    {"kind": "grpo", "whiten": "batch"},
]
LOSSES = [kind for kind in KINDS if kind["kind"] not in ("gspo", "gmpo")]
# Count rows as episodes, in one place each.
ROWS_AS_EPISODES = {"advantages": advantage_samples, "lengths of samples": trainer_samples, "samples": blocks_module}


@pytest.mark.parametrize("mutant", ["", *ROWS_AS_EPISODES])
def test_gradients_do_not_depend_on_the_split(mutant: str, monkeypatch: pytest.MonkeyPatch):
    tables = [batch(number) for number in (1, 2, 7)]
    if mutant:
        every_row = lambda samples: np.arange(samples.num_rows)  # noqa: E731
        monkeypatch.setattr(ROWS_AS_EPISODES[mutant], "begins_of_samples", every_row)
    more = {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": {"weight": "token", "weight_cap": 1.2}}
    with caught(mutant):
        for advantage in ADVANTAGES:
            batches = [compute_advantages(table, AdvantageConfig(**advantage)) for table in tables]
            for mean in MEANS:
                for loss in LOSSES if advantage == {"kind": "grpo"} else LOSSES[:1]:
                    own = {key: value for key, value in more.items() if loss["kind"] != "sft" or key != "correction"}
                    whole, *splits = (gradient(table, LossConfig(**loss, **mean, **own)) for table in batches)
                    assert whole.abs().sum() > 0.01
                    for split in splits:  # float32 columns: of order 1e-7 each, and of 12 tokens at most one sum
                        assert torch.allclose(split, whole, rtol=1e-5, atol=1e-8), (advantage, mean, loss)
