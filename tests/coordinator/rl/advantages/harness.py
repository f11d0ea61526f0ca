"""Batches for estimators, and a slow reference implementation of every estimator as loops over plain numbers."""

import functools
import itertools
import math
import random
import statistics
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from services.common.batches import SAMPLE_SCHEMA
from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages import ESTIMATORS, compute_advantages

# max_rl refuses some of the rewards that are drawn here, and gdpo reads no reward.
KINDS = sorted(ESTIMATORS.keys() - {"python", "max_rl", "gdpo"})
Row = dict[str, Any]


def row(reward: float, num_tokens: int = 1, group: int = 0, **columns: Any) -> Row:
    """Returns one sample; columns that are not given are those of a run without critic, reference or mask."""
    return {
        "prompt_id": f"p{group}",
        "group": group,
        "sample": 0,
        "prompt_tokens": [3],
        "tokens": [4] * num_tokens,
        "logprobs": [-1.0] * num_tokens,
        "reward": reward,
        "components": [],
        "finish_reason": "stop",
        "policy_version": 0,
        "policy_digest": "d",
        "scorer": "s",
        "seed": 0,
        **columns,
    }


def table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def computed(rows: list[Row], column: str = "advantages", **config: Any) -> list[list[float]]:
    return compute_advantages(table(rows), AdvantageConfig(**config))[column].to_pylist()


def trained(rows: list[Row], lists: list[list[float]]) -> list[list[float]]:
    """Returns the numbers of each sample at its unmasked tokens."""
    return [
        [x for x, used in zip(numbers, mask(r), strict=True) if used] for r, numbers in zip(rows, lists, strict=True)
    ]


def mask(row: Row) -> list[bool]:
    return row.get("loss_mask") or [True] * len(row["tokens"])


def penalties(row: Row, config: AdvantageConfig) -> list[float]:
    """Returns the KL penalty of each token; 0 at masked tokens."""
    if not config.kl.coef:
        return [0.0] * len(row["tokens"])
    x = [p - r for p, r in zip(row["logprobs"], row["ref_logprobs"], strict=True)]
    estimate = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: min(10.0, math.exp(min(20.0, -d)) - 1 + d),
        "abs": abs,
    }[config.kl.kind]
    return [config.kl.coef * estimate(d) if used else 0.0 for d, used in zip(x, mask(row), strict=True)]


def net(row: Row, config: AdvantageConfig) -> float:
    """Returns a sample's reward minus the penalties of its tokens: of all if none is trained."""
    return row["reward"] - sum(penalties(row if any(mask(row)) else row | {"loss_mask": None}, config))


def reference(rows: list[Row], config: AdvantageConfig) -> list[list[float]]:
    """Computes the advantages of all tokens directly by their definitions."""
    advantages = [_advantages(row, rows, config) for row in rows]
    advantages = [
        [a if m else 0.0 for a, m in zip(x, mask(r), strict=True)] for x, r in zip(advantages, rows, strict=True)
    ]
    if config.whitening != "none":
        advantages = _whitened(advantages, rows, config)
    return [
        [a + t for a, t in zip(x, _toward_teacher(r, config), strict=True)]
        for x, r in zip(advantages, rows, strict=True)
    ]


def _toward_teacher(row: Row, config: AdvantageConfig) -> list[float]:
    coef = config.distill_coef or (1.0 if config.kind == "distill" else 0.0)
    if not coef:
        return [0.0] * len(row["tokens"])
    pairs = zip(row["teacher_logprobs"], row["logprobs"], mask(row), strict=True)
    return [coef * (teacher - policy) if used else 0.0 for teacher, policy, used in pairs]


def _whitened(advantages: list[list[float]], rows: list[Row], config: AdvantageConfig) -> list[list[float]]:
    whitened = []
    for row, numbers in zip(rows, advantages, strict=True):
        peers = [r["group"] == row["group"] or config.whitening == "batch" for r in rows]
        parts = trained(rows, advantages)
        pool = flat(part for part, peer in zip(parts, peers, strict=True) if peer)
        mean, std = (statistics.fmean(pool), statistics.pstdev(pool)) if pool else (0.0, 0.0)
        whitened.append(
            [(a - mean) / (std + config.eps) if m else 0.0 for a, m in zip(numbers, mask(row), strict=True)]
        )
    return whitened


def _advantages(row: Row, rows: list[Row], config: AdvantageConfig) -> list[float]:
    peers = [r for r in rows if r["group"] == row["group"]]
    nets = [net(r, config) for r in peers]
    own, num_tokens = net(row, config), len(row["tokens"])
    mean = statistics.fmean(nets)
    if config.kind in ("dr_grpo", "reinforce_plus_plus_baseline"):
        return [own - mean] * num_tokens
    if config.kind == "grpo":
        return [(own - mean) / (statistics.stdev(nets) + config.eps if config.normalize_std else 1)] * num_tokens
    if config.kind == "rloo":
        return [own - (sum(nets) - own) / (len(nets) - 1)] * num_tokens
    if config.kind == "opo":
        lengths = [sum(mask(r)) for r in peers]
        weighted = sum(n * x for n, x in zip(lengths, nets, strict=True))
        return [own - weighted / sum(lengths) if sum(lengths) else 0.0] * num_tokens
    if config.kind == "gpg":
        return [(own - mean) * _gpg_factor(rows, config)] * num_tokens
    if config.kind == "distill":
        return [0.0] * num_tokens
    if config.kind == "per_turn":
        pools = itertools.zip_longest(*(_turn_returns(r, config) for r in peers))
        means = [statistics.fmean(x for x in pool if x is not None) for pool in pools]
        returns, turns = _turn_returns(row, config), _turns(row)
        return [returns[t] - means[t] if t is not None else 0.0 for t in turns]
    return _token_advantages(row, config)


def _gpg_factor(rows: list[Row], config: AdvantageConfig) -> float:
    nets: dict[int, list[float]] = {}
    for r in rows:
        nets.setdefault(r["group"], []).append(net(r, config))
    return len(rows) / max(1, sum(len(group) for group in nets.values() if min(group) < max(group)))


def _turns(row: Row) -> list[int | None]:
    """Returns the turn of every token; None for masked tokens."""
    turns, turn = [], -1
    for index, used in enumerate(mask(row)):
        turn += used and (index == 0 or not mask(row)[index - 1])
        turns.append(turn if used else None)
    return turns


def _turn_returns(row: Row, config: AdvantageConfig) -> list[float]:
    num_turns = max(1, len(set(_turns(row)) - {None}))
    return [net(row, config) * config.gamma ** (num_turns - 1 - turn) for turn in range(num_turns)]


def _token_advantages(row: Row, config: AdvantageConfig) -> list[float]:
    used = [index for index, m in enumerate(mask(row)) if m]
    rewards = [-penalties(row, config)[index] for index in used]
    if rewards:
        rewards[-1] += row["reward"]
    advantages = [0.0] * len(row["tokens"])
    for i, index in enumerate(used):
        if config.kind == "gae":
            advantages[index] = _gae(rewards, [row["values"][j] for j in used], i, row, config)
        else:
            gamma = config.gamma if config.kind == "reinforce_plus_plus" else 1.0
            ahead = sum(gamma ** (j - i) * rewards[j] for j in range(i, len(used)))
            advantages[index] = ahead - (row["baseline"] if config.kind == "remax" else 0.0)
    return advantages


def _gae(rewards: list[float], values: list[float], start: int, row: Row, config: AdvantageConfig) -> float:
    goes_on = config.bootstrap_truncated and row["finish_reason"] == "length"
    after = [*values[1:], values[-1] if goes_on else 0.0]
    errors = [r + config.gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return sum((config.gamma * config.lam) ** (j - start) * errors[j] for j in range(start, len(errors)))


def flat(lists: Iterable[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(lists))


def some_batch(seed: int, *, masked: bool = True) -> list[Row]:
    """Draws 1 to 4 groups of 2 to 4 samples with all columns, in random order.

    Numbers are multiples of 1/16, so their sums and squares are exact, and equal rewards stay equal in any order of
    addition. Every third group on average has equal rewards, and every fifth sample is fully masked.
    """
    chance, rows = random.Random(seed), []
    for group in range(chance.randint(1, 4)):
        baseline, spread = _number(chance), chance.choice([0, 1, 1])
        for _ in range(chance.randint(2, 4)):
            size, keeps = chance.randint(1, 6), chance.choice([0.0, 0.6, 0.6, 1.0, 1.0])
            names = ("logprobs", "ref_logprobs", "values", "teacher_logprobs")
            columns = {name: [_number(chance) for _ in range(size)] for name in names}
            columns["loss_mask"] = [chance.random() < keeps for _ in range(size)] if masked else None
            reward, reason = baseline + spread * _number(chance), chance.choice(["stop", "length"])
            rows.append(row(reward, size, 3 * group + 1, baseline=baseline, finish_reason=reason, **columns))
    return chance.sample(rows, len(rows))


def _number(chance: random.Random) -> float:
    return chance.randint(-32, 32) / 16


# Hypothesis draws only the seed: drawing every number would take a hundred times longer than computing advantages.
batches = st.integers(0, 2**32).map(some_batch)
unmasked_batches = st.integers(0, 2**32).map(functools.partial(some_batch, masked=False))


@st.composite
def configs(draw: st.DrawFn) -> AdvantageConfig:
    """Draws a kind of advantage with any values of the settings that it reads."""
    kind = draw(st.sampled_from(KINDS))
    settings: dict[str, Any] = {"kind": kind, "whiten": draw(st.sampled_from(["auto", "none", "group", "batch"]))}
    settings["kl"] = {"coef": draw(st.sampled_from([0, 0.5])), "kind": draw(st.sampled_from(["k1", "k2", "abs"]))}
    if kind == "distill":  # refuses what only changes a reward's advantage
        settings = {"kind": kind}
    settings["distill_coef"] = draw(st.sampled_from([None, 0.25, 2.0]))
    unit = st.integers(0, 10).map(lambda n: n / 10)
    if kind == "grpo":
        settings["normalize_std"] = draw(st.booleans())
    if kind in ("gae", "reinforce_plus_plus", "per_turn"):
        settings["gamma"] = draw(unit)
    if kind == "gae":
        settings |= {"lam": draw(unit), "bootstrap_truncated": draw(st.booleans())}
    return AdvantageConfig(**settings)
