"""Tests every estimator against a slow reference implementation, and properties that hold for any batch."""

import itertools
import statistics
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.common.config.advantage import AdvantageConfig
from services.common.config.streaming import STREAMED_KINDS
from services.coordinator.rl.advantages import compute_advantages
from tests.coordinator.rl.advantages.harness import (
    KINDS,
    Row,
    batches,
    computed,
    configs,
    flat,
    mask,
    reference,
    table,
    trained,
    unmasked_batches,
)
from tests.coordinator.rl.advantages.harness import row as sample

# Advantages are float32, with a relative rounding error of 2^-24. All other numbers are float64 around 1, or around
# 1 / eps of that.
CLOSE = {"rel": 1e-6, "abs": 1e-6}
OF_REWARDS = [kind for kind in KINDS if kind != "distill"]
COMPARED = [kind for kind in KINDS if AdvantageConfig(kind=kind).needs_group]
quickly = settings(max_examples=15, deadline=None, derandomize=True)


def assert_close(one: list[list[float]], other: list[list[float]], **tolerance: float) -> None:
    assert [len(numbers) for numbers in one] == [len(numbers) for numbers in other]
    assert flat(one) == pytest.approx(flat(other), **(tolerance or CLOSE))


@settings(quickly, max_examples=150)
@given(batches, configs())
def test_as_the_definitions_say(rows: list[Row], config: AdvantageConfig) -> None:
    assert_close(compute_advantages(table(rows), config)["advantages"].to_pylist(), reference(rows, config))


@quickly
@given(batches, configs(), st.randoms(use_true_random=False), st.permutations([0, 5, 2, 9]))
def test_order_of_samples_and_names_of_groups_do_not_matter(rows: list, config: Any, chance: Any, names: list) -> None:
    order = chance.sample(range(len(rows)), len(rows))
    renamed = [rows[index] | {"group": names[rows[index]["group"] // 3]} for index in order]
    moved = compute_advantages(table(renamed), config)["advantages"].to_pylist()
    before = compute_advantages(table(rows), config)["advantages"].to_pylist()
    assert_close(moved, [before[index] for index in order])


@settings(quickly, max_examples=150)
@given(batches, configs())
def test_advantages_of_streamed_kinds_are_those_of_each_group_alone(rows: list[Row], config: AdvantageConfig) -> None:
    """A streamed step computes them for each block, and the trainer compares these with the whole batch's, so they are
    equal to the last bit."""
    assume(config.kind in STREAMED_KINDS and config.whitening != "batch")
    rows = sorted((inexact(one) for one in rows), key=lambda one: one["group"])
    whole = compute_advantages(table(rows), config)["advantages"].to_pylist()
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda one: one["group"])]
    alone = [compute_advantages(table(group), config)["advantages"].to_pylist() for group in groups]
    assert whole == flat(alone)


def inexact(one: Row) -> Row:
    """Returns the row with numbers whose sums are rounded."""
    names = ("logprobs", "ref_logprobs", "teacher_logprobs")
    changed = {name: [number / 3 for number in one[name]] for name in names}
    return one | changed | {name: one[name] / 3 for name in ("reward", "baseline")}


@quickly
@given(batches, configs())
def test_tokens_that_are_masked_do_not_matter(rows: list[Row], config: AdvantageConfig) -> None:
    """Masked tokens only separate turns: without them, the trained tokens have the same advantages."""
    if config.kind == "per_turn":
        return
    bare = []
    for row in rows:
        if not any(mask(row)):  # its KL penalty tells the others what its answer is worth
            bare.append(row)
            continue
        per_token = {
            name: [x for x, used in zip(row[name], mask(row), strict=True) if used]
            for name in ("tokens", "logprobs", "ref_logprobs", "teacher_logprobs", "values")
        }
        bare.append(row | per_token | {"loss_mask": None})
    before = compute_advantages(table(rows), config)["advantages"].to_pylist()
    after = compute_advantages(table(bare), config)["advantages"].to_pylist()
    assert_close(trained(bare, after), trained(rows, before))
    assert all(a == 0 for row, x in zip(rows, before, strict=True) for a, m in zip(x, mask(row), strict=True) if not m)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpg"])  # gpg's factor is that of the batch
@quickly
@given(batches)
def test_groups_do_not_see_each_other_without_whitening(kind: str, rows: list[Row]) -> None:
    together = computed(rows, kind=kind, whiten="none")
    for group in {row["group"] for row in rows}:
        inside = [index for index, row in enumerate(rows) if row["group"] == group]
        alone = computed([rows[index] for index in inside], kind=kind, whiten="none")
        assert_close(alone, [together[index] for index in inside])


@pytest.mark.parametrize("kind", COMPARED)
@quickly
@given(batches, st.sampled_from([-3.0, 0.0625, 100.0]))
def test_a_constant_in_all_rewards_changes_nothing(kind: str, rows: list[Row], constant: float) -> None:
    shifted = [row | {"reward": row["reward"] + constant} for row in rows]
    assert_close(computed(shifted, kind=kind, whiten="none"), computed(rows, kind=kind, whiten="none"))


@pytest.mark.parametrize("kind", COMPARED)
@pytest.mark.parametrize("whiten", ["none", "group", "batch"])
@quickly
@given(st.lists(st.integers(1, 999), min_size=2, max_size=9), st.sampled_from([-1e6, -0.3, 1e-3, 1.0, 1e6]))
def test_rewards_that_differ_by_rounding_only_teach_exactly_nothing(kind: str, whiten: str, parts: list, whole: float):
    """Adds the same scores in different orders: only an eps that nobody would set shows what is left of rounding."""
    scores = [whole * part / sum(parts) for part in parts]
    rewards = [sum(scores), sum(reversed(scores)), sum(sorted(scores)), whole]
    rows = [sample(reward, 1 + index, group) for index, reward in enumerate(rewards) for group in (0, 1)]
    assert not any(flat(computed(rows, kind=kind, whiten=whiten, eps=1e-30)))


@quickly
@given(batches, st.lists(st.integers(-100, 100), min_size=1, max_size=5), st.integers(0, 10), st.booleans())
def test_turns_that_earn_the_same_teach_exactly_nothing(rows: list[Row], rewards: list[int], gamma: int, is_env: bool):
    """Samples of a group that earn the same at every turn have advantage 0, however long their turns are."""
    tenths = [reward / 10 for reward in rewards]
    rows = [sample(0.0, 0, one["group"]) | _turns_of(tenths, len(one["tokens"]), is_env=is_env) for one in rows]
    assert not any(flat(computed(rows, kind="per_turn", gamma=gamma / 10)))


def _turns_of(rewards: list[float], size: int, *, is_env: bool) -> dict[str, Any]:
    """Returns the columns of a sample with a turn of `size` tokens, and one that is not trained on, for each reward."""
    num_tokens, begins = len(rewards) * (size + 1), [turn * (size + 1) for turn in range(len(rewards))]
    columns = {"tokens": [4] * num_tokens, "logprobs": [-1.0] * num_tokens, "reward": sum(rewards[::-1])}
    columns["loss_mask"] = ([True] * size + [False]) * len(rewards)
    episode = {"turn_begins": begins, "turn_ends": [begin + size for begin in begins], "turn_rewards": rewards}
    return columns | (episode | {"environment": "e 1"} if is_env else {})


@pytest.mark.parametrize("kind", [kind for kind in OF_REWARDS if kind not in ("grpo", "gae")])
@quickly
@given(batches, st.sampled_from([-2.0, 0.5, 3.0]))
def test_advantages_scale_with_rewards(kind: str, rows: list[Row], scale: float) -> None:
    scaled = [row | {"reward": scale * row["reward"], "baseline": scale * row["baseline"]} for row in rows]
    before = computed(rows, kind=kind, whiten="none")
    assert_close(computed(scaled, kind=kind, whiten="none"), [[scale * a for a in numbers] for numbers in before])


@pytest.mark.parametrize(
    "config", [{"kind": "grpo"}, *({"kind": kind, "whiten": "batch"} for kind in OF_REWARDS)], ids=str
)
@quickly
@given(batches)
def test_whitened_advantages_do_not_scale_with_rewards(config: dict, rows: list[Row]) -> None:
    """The advantages differ by up to eps / std; here the std is 0 or, for at most 96 multiples of 1/16, above 1e-4."""
    scaled = [row | {"reward": 4 * row["reward"], "baseline": 4 * row["baseline"]} for row in rows]
    scaled = [row | {"values": [4 * value for value in row["values"]]} for row in scaled]
    assert_close(computed(scaled, **config, eps=1e-12), computed(rows, **config, eps=1e-12), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("whiten", ["group", "batch"])
@quickly
@given(batches, st.sampled_from(OF_REWARDS))
def test_whitening_gives_mean_0_and_deviation_1(whiten: str, rows: list[Row], kind: str) -> None:
    before = trained(rows, computed(rows, kind=kind, whiten="none"))
    after = trained(rows, computed(rows, kind=kind, whiten=whiten, eps=1e-12))
    for group in {row["group"] for row in rows} if whiten == "group" else {None}:
        inside = [index for index, row in enumerate(rows) if group in (None, row["group"])]
        raw, numbers = (flat(lists[index] for index in inside) for lists in (before, after))
        if numbers and max(raw) > min(raw):
            assert statistics.fmean(numbers) == pytest.approx(0, abs=1e-6)
            assert statistics.pstdev(numbers) == pytest.approx(1, rel=1e-6)


@quickly
@given(unmasked_batches)
def test_how_the_estimators_are_related(rows: list[Row]) -> None:
    plain = computed(rows, kind="dr_grpo")
    sizes = [sum(r["group"] == row["group"] for r in rows) for row in rows]
    rloo = [[n / (n - 1) * a for a in numbers] for n, numbers in zip(sizes, plain, strict=True)]
    assert_close(computed(rows, kind="rloo"), rloo)
    assert_close(computed(rows, kind="grpo", normalize_std=False), plain)
    assert_close(computed(rows, kind="per_turn", gamma=0.3), plain)  # one turn each
    assert_close(computed(rows, kind="reinforce_plus_plus_baseline", whiten="none"), plain)
    equally_long = [row | {"tokens": [4], "logprobs": [-1.0], "loss_mask": None} for row in rows]
    assert_close(computed(equally_long, kind="opo"), [numbers[:1] for numbers in plain])
    no_critic = [row | {"values": [0.0] * len(row["tokens"])} for row in rows]
    critic_free = computed(rows, kind="reinforce_plus_plus", gamma=0.5)
    assert_close(computed(no_critic, kind="gae", gamma=0.5), critic_free)
    no_baseline = [row | {"baseline": 0.0} for row in rows]
    assert_close(computed(no_baseline, kind="remax"), computed(rows, kind="reinforce_plus_plus", whiten="none"))


@quickly
@given(batches)
def test_max_rl_divides_by_the_mean_reward_of_the_group(rows: list[Row]) -> None:
    rows = [row | {"reward": abs(row["reward"])} for row in rows]
    scaled = []
    for row, numbers in zip(rows, computed(rows, kind="dr_grpo"), strict=True):
        mean = statistics.fmean(other["reward"] for other in rows if other["group"] == row["group"])
        scaled.append([number / (mean + 1e-6) for number in numbers])
    assert_close(computed(rows, kind="max_rl"), scaled)


@quickly
@given(batches)
def test_baselines_cancel_within_a_group(rows: list[Row]) -> None:
    """Advantages sum to 0 over samples or, for opo, whose baseline is weighted by length, over tokens."""
    per_token, bare = computed(rows, kind="opo"), computed([row | {"loss_mask": None} for row in rows], kind="dr_grpo")
    for group in {row["group"] for row in rows}:
        inside = [index for index, row in enumerate(rows) if row["group"] == group]
        assert sum(bare[index][0] for index in inside) == pytest.approx(0, abs=1e-6)
        assert sum(sum(per_token[index]) for index in inside) == pytest.approx(0, abs=1e-5)


@quickly
@given(batches)
def test_gae_at_the_ends_of_lam(rows: list[Row]) -> None:
    """Tests that GAE is return - value with lam 1, and the one-step error with lam 0.

    The undiscounted return is the reward.
    """
    monte_carlo = computed(rows, kind="gae", lam=1, gamma=1, whiten="none")
    one_step = computed(rows, kind="gae", lam=0, gamma=1, whiten="none")
    for row, whole, short in zip(rows, trained(rows, monte_carlo), trained(rows, one_step), strict=True):
        values = [value for value, used in zip(row["values"], mask(row), strict=True) if used]
        assert whole == [row["reward"] - value for value in values]  # exact: multiples of 1/16
        following = [*values[1:], row["reward"]] if values else []
        assert short == [after - value for value, after in zip(values, following, strict=True)]


@quickly
@given(batches, st.floats(0, 1), st.floats(0, 1), st.booleans(), st.sampled_from(["none", "group", "batch"]))
def test_returns_are_unwhitened_advantages_plus_values(rows, gamma, lam, bootstrap, whiten) -> None:
    config = {"kind": "gae", "gamma": gamma, "lam": lam, "bootstrap_truncated": bootstrap}
    plain = trained(rows, computed(rows, **config, whiten="none"))
    values = trained(rows, [row["values"] for row in rows])
    expected = [[a + v for a, v in zip(x, y, strict=True)] for x, y in zip(plain, values, strict=True)]
    returns = computed(rows, "returns", **config, whiten=whiten)
    assert_close(trained(rows, returns), expected)
    assert all(r == 0 for row, x in zip(rows, returns, strict=True) for r, m in zip(x, mask(row), strict=True) if not m)


@quickly
@given(batches)
def test_a_perfect_critic_leaves_nothing_to_learn(rows: list[Row]) -> None:
    perfect = [row | {"values": [row["reward"]] * len(row["tokens"])} for row in rows]
    assert computed(perfect, kind="gae", lam=0.5) == [[0.0] * len(row["tokens"]) for row in rows]
