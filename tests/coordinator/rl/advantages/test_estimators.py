"""Tests every estimator against numbers computed by hand, and the batches that it rejects."""

import itertools
import math
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from services.common.batches import SAMPLE_SCHEMA
from services.common.config.advantage import AdvantageConfig
from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.rl.advantages import compute_advantages
from tests.coordinator.rl.advantages.harness import KINDS, computed, row, table
from tests.support import raises

YES, NO = True, False
COMPARED = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "per_turn", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize(
    ("config", "rewards", "expected"),
    [
        # mean 0.25, sample std sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5
        ({"kind": "grpo", "eps": 1e-12}, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        # mean 2, sample std 1; eps 1 halves it
        ({"kind": "grpo", "eps": 1.0}, [1, 2, 3], [-0.5, 0, 0.5]),
        ({"kind": "grpo", "normalize_std": False}, [1, 2, 3], [-1, 0, 1]),
        ({"kind": "dr_grpo"}, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ({"kind": "dr_grpo"}, [-2, 2], [-2, 2]),
        # mean 0.25
        ({"kind": "max_rl", "eps": 1e-12}, [1, 0, 0, 0], [3, -1, -1, -1]),
        ({"kind": "max_rl", "eps": 1.0}, [1, 2, 3], [-1 / 3, 0, 1 / 3]),
        ({"kind": "max_rl"}, [0, 0], [0, 0]),
        # the others' mean is 0 for the first and 1/3 for the rest
        ({"kind": "rloo"}, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ({"kind": "rloo"}, [1, 2, 6], [-3, -1.5, 4.5]),
    ],
)
def test_one_advantage_for_each_sample(config: dict, rewards: list, expected: list):
    rows = [row(reward, num_tokens=index + 1) for index, reward in enumerate(rewards)]
    for index, numbers in enumerate(computed(rows, **config)):
        assert numbers == pytest.approx([expected[index]] * (index + 1), abs=1e-6)  # float32, and the default eps


@pytest.mark.parametrize("kind", [*COMPARED, "max_rl"])
@pytest.mark.parametrize("reward", [0.7, 1e9 + 0.1])
def test_equal_rewards_teach_exactly_nothing(kind: str, reward: float):
    assert computed([row(reward)] * 3, kind=kind) == [[0], [0], [0]]


def test_max_rl_refuses_negative_rewards():
    with raises(InvalidInput, field="reward"):
        computed([row(1), row(-0.5)], kind="max_rl")


def test_opo_weighs_rewards_by_length():
    # (1 * 1 + 2 * 0 + 3 * 0 + 4 * 0.5) / 10 = 0.3
    rows = [row(1, 1), row(0, 2), row(0, 3), row(0.5, 4)]
    assert [numbers[0] for numbers in computed(rows, kind="opo")] == pytest.approx([0.7, -0.3, -0.3, 0.2], abs=1e-6)
    # Only trained tokens weigh: (1 * 1 + 1 * 0) / 2 = 0.5
    rows = [row(1, 1), row(0, 3, loss_mask=[NO, YES, NO])]
    assert computed(rows, kind="opo") == [[0.5], [0, -0.5, 0]]


def test_gpg_scales_up_for_groups_without_a_signal():
    # Two of five samples are in a group whose rewards differ: (r - 0.5) * 5 / 2
    rows = [row(1), row(0), row(0.3, group=1), row(0.3, group=1), row(0.1 + 0.2, group=1)]
    assert computed(rows, kind="gpg") == [[1.25], [-1.25], [0], [0], [0]]


def test_reinforce_plus_plus_baseline_is_whitened_over_tokens():
    # Centered: 0.5 once and -0.5 three times: mean -0.25, variance (0.5625 + 3 * 0.0625) / 4 = 3 / 16, std
    # sqrt(3) / 4: 0.75 / that is sqrt(3), -0.25 / that is -1 / sqrt(3)
    rows = [row(1, 1), row(0, 3)]
    high, low = computed(rows, kind="reinforce_plus_plus_baseline", eps=1e-12)
    assert high == pytest.approx([math.sqrt(3)], rel=1e-6)
    assert low == pytest.approx([-1 / math.sqrt(3)] * 3, rel=1e-6)


def test_whitening_by_group():
    # The advantages are the same within each group, independent of the scale of its rewards.
    rows = [row(1, 1), row(50, 1, group=1), row(0, 3), row(40, 3, group=1)]
    high, low = [math.sqrt(3)], [-1 / math.sqrt(3)] * 3
    whitened = computed(rows, kind="dr_grpo", whiten="group", eps=1e-12)
    for numbers, expected in zip(whitened, [high, high, low, low], strict=True):
        assert numbers == pytest.approx(expected, rel=1e-6)


# log policy - log reference is 1, 2, -1. 0.1 times that is subtracted from the reward of each token, which gives -0.1,
# -0.2 and 0.1; the last token also has the sample's reward of 1.
KL_ROW = row(1, 3, logprobs=[-1, -1, -2], ref_logprobs=[-2, -3, -1], baseline=0.4)


def test_reinforce_plus_plus_sums_what_is_to_come():
    # 1.1; -0.2 + 0.5 * 1.1 = 0.35; -0.1 + 0.5 * 0.35 = 0.075. One sample of a prompt is enough.
    config = {"kind": "reinforce_plus_plus", "gamma": 0.5, "whiten": "none", "kl": {"coef": 0.1}}
    assert computed([KL_ROW], **config)[0] == pytest.approx([0.075, 0.35, 1.1], abs=1e-6)
    # With the default whitening: mean 1.525 / 3, and the population std
    mean = 1.525 / 3
    std = math.sqrt(((0.075 - mean) ** 2 + (0.35 - mean) ** 2 + (1.1 - mean) ** 2) / 3)
    expected = [(number - mean) / std for number in (0.075, 0.35, 1.1)]
    assert computed([KL_ROW], **config | {"whiten": "auto", "eps": 1e-12})[0] == pytest.approx(expected, rel=1e-5)


def test_returns_stay_within_their_sample():
    rows = [row(1, 1), row(2, 3), row(4, 2), row(8, 2, loss_mask=[NO, NO]), row(16, 3, loss_mask=[NO, YES, YES])]
    assert computed(rows, kind="reinforce_plus_plus", gamma=0.5, whiten="none") == [
        [1],
        [0.5, 1, 2],
        [2, 4],
        [0, 0],
        [0, 8, 16],
    ]


def test_remax_subtracts_the_greedy_reward():
    # 1.1 - 0.4; 0.9 - 0.4; 0.8 - 0.4
    assert computed([KL_ROW], kind="remax", kl={"coef": 0.1})[0] == pytest.approx([0.4, 0.5, 0.7], abs=1e-6)
    assert computed([KL_ROW], kind="remax")[0] == pytest.approx([0.6] * 3, abs=1e-6)


def test_gae_discounts_the_errors_of_the_values():
    # Errors: 0.5 * 0.25 - 0.5 = -0.375; 0.5 * 0.75 - 0.25 = 0.125; 1 - 0.75 = 0.25. Discounted by 0.25:
    # 0.25; 0.125 + 0.0625 = 0.1875; -0.375 + 0.046875 = -0.328125. Returns are these + values.
    config = {"kind": "gae", "gamma": 0.5, "lam": 0.5, "whiten": "none"}
    rows = [row(1, 3, values=[0.5, 0.25, 0.75])]
    assert computed(rows, **config) == [[-0.328125, 0.1875, 0.25]]
    assert computed(rows, "returns", **config) == [[0.171875, 0.4375, 1.0]]
    # The tool's token in the middle is not the policy's, so the next value is that of the state after it. Errors:
    # 0.5 * 0.75 - 0.5 = -0.125 and 0.25
    masked = [row(1, 3, values=[0.5, 9, 0.75], loss_mask=[YES, NO, YES])]
    assert computed(masked, **config) == [[-0.0625, 0, 0.25]]
    assert computed(masked, "returns", **config) == [[0.4375, 0, 1.0]]


def test_gae_may_bootstrap_truncated_samples():
    # Error of the last token: 1 + 0.5 * 0.75 - 0.75 = 0.625, or 0.25 if the sample has ended or nothing follows.
    config = {"kind": "gae", "gamma": 0.5, "lam": 0.5, "whiten": "none"}
    rows = [row(1, 1, values=[0.75], finish_reason=reason) for reason in ("length", "stop")]
    assert computed(rows, **config, bootstrap_truncated=True) == [[0.625], [0.25]]
    assert computed(rows, **config) == [[0.25], [0.25]]


def test_whitening_leaves_the_targets_of_the_critic_alone():
    rows = [row(reward, 2, values=[0.5, 0.25]) for reward in (0, 1)]
    returns = [computed(rows, "returns", kind="gae", whiten=whiten) for whiten in ("none", "batch")]
    assert returns[0] == returns[1] == [[0, 0], [1, 1]]


def test_turns_of_a_group_are_compared_with_one_another():
    # Three turns of a sample with reward 1 and discount 0.5 return 0.25, 0.5, 1; two turns with reward 0 return 0, and
    # one turn with reward 0.5 returns 0.5: means 0.25 and 0.25, independent of the turns' lengths. Nothing is like the
    # third turn.
    rows = [row(1, 7, loss_mask=[YES, YES, NO, YES, NO, NO, YES]), row(0, 3, loss_mask=[YES, NO, YES]), row(0.5, 2)]
    assert computed(rows, kind="per_turn", gamma=0.5) == [[0, 0, 0, 0.25, 0, 0, 0], [-0.25, 0, -0.25], [0.25, 0.25]]
    # Adjacent samples whose turns touch: 0.5 and 1, 0.25
    rows = [row(1, 3, loss_mask=[YES, NO, YES]), row(0.25, 3, loss_mask=[YES, NO, NO])]
    assert computed(rows, kind="per_turn", gamma=0.5) == [[0.125, 0, 0], [-0.125, 0, 0]]


def test_a_masked_episode_is_compared_turn_by_turn():
    episode = {"turn_begins": [0, 2], "turn_ends": [1, 3], "turn_rewards": [0, 0.25], "environment": "e"}
    rows = [row(1, 3, loss_mask=[YES, NO, YES], **episode), row(1, 3, loss_mask=[NO] * 3, **episode)]
    assert computed(rows, kind="per_turn", gamma=0.5) == [[0, 0, 0], [0, 0, 0]]
    rows[1]["reward"] = 0  # returns 0.5, 1 and 0, 0
    assert computed(rows, kind="per_turn", gamma=0.5) == [[0.25, 0, 0.5], [0, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dr_grpo", [[1], [0], [0, 0]]),  # the mean of 2, 1, 0 is 1; it would be 1.5 without the last
        ("grpo", [[1], [0], [0, 0]]),  # sample std 1
        ("max_rl", [[1], [0], [0, 0]]),  # mean 1
        ("rloo", [[1.5], [0], [0, 0]]),
        ("gpg", [[1], [0], [0, 0]]),
        ("per_turn", [[1], [0], [0, 0]]),
        ("opo", [[0.5], [-0.5], [0, 0]]),  # weighted by trained length, which is 0 for the third: mean of 2 and 1
        ("reinforce_plus_plus_baseline", [[1], [-1], [0, 0]]),  # 1 and 0, whitened over the two trained tokens
    ],
)
def test_fully_masked_sample_still_counts_for_its_group(kind: str, expected: list):
    """Overlong filtering removes a sample's gradient, but its reward still counts in the baseline."""
    rows = [row(2), row(1), row(0, 2, loss_mask=[NO, NO])]
    for advantages, wanted in zip(computed(rows, kind=kind), expected, strict=True):
        assert advantages == pytest.approx(wanted, abs=1e-5)  # eps 1e-6 relative to stds of 1 and 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_batch_without_a_trained_token_has_no_advantages(kind: str):
    rows = [row(n, 2, loss_mask=[NO, NO], values=[0, 0], baseline=0, teacher_logprobs=[-1, -1]) for n in (0, 1)]
    assert computed(rows, kind=kind) == [[0, 0], [0, 0]]


def test_only_the_columns_of_advantages_change():
    before = table([row(1, 2, values=[0, 1]), row(0, 1, values=[2])])
    after = compute_advantages(before, AdvantageConfig(kind="gae"))
    assert after.schema.equals(SAMPLE_SCHEMA)
    assert [name for name in before.column_names if before[name] != after[name]] == ["advantages", "returns"]
    without_critic = compute_advantages(before, AdvantageConfig())
    assert without_critic["returns"].null_count == 2


def test_a_table_of_several_chunks_is_one_batch():
    parts = [table([row(reward, 2, loss_mask=mask)]) for reward, mask in ((1, [YES, NO]), (0, None), (2, None))]
    assert compute_advantages(pa.concat_tables(parts), AdvantageConfig(kind="dr_grpo"))["advantages"].to_pylist() == [
        [0, 0],
        [-1, -1],
        [1, 1],
    ]


@pytest.mark.parametrize(
    ("field", "config", "columns"),
    [
        ("values", {"kind": "gae"}, {}),
        ("baseline", {"kind": "remax"}, {}),
        ("ref_logprobs", {"kind": "grpo", "kl": {"coef": 0.1}}, {}),
        ("values", {"kind": "gae"}, {"values": [0.5]}),
        ("ref_logprobs", {"kl": {"coef": 0.1}}, {"ref_logprobs": [0.5] * 3}),
        ("loss_mask", {}, {"loss_mask": [True]}),
    ],
)
def test_missing_or_misshapen_column_is_named(field: str, config: dict, columns: dict):
    rows = [row(0, 2, values=[0, 0], baseline=0, ref_logprobs=[0, 0])]
    rows += [row(1, 2, **columns) if columns else row(1, 2)]
    with raises(InvalidInput, field=field) as caught:
        computed(rows, **config)
    assert caught.value.metadata["field"] == field


def test_group_of_one_is_refused_where_samples_are_compared():
    rows = [row(0), row(1), row(1, group=5, values=[0], baseline=0, teacher_logprobs=[-1])]
    for kind in KINDS:
        if AdvantageConfig(kind=kind).needs_group:
            with raises(InvalidInput, field="group"):
                computed(rows, kind=kind)
        else:
            assert computed(rows[2:], kind=kind)


def test_what_a_kind_needs():
    needs = {
        kind: [
            name for name in ("group", "values", "baseline", "reference", "teacher") if getattr(config, f"needs_{name}")
        ]
        for kind, config in ((kind, AdvantageConfig(kind=kind)) for kind in KINDS)
    }
    alone = {"gae": ["values"], "remax": ["baseline"], "reinforce_plus_plus": [], "distill": ["teacher"]}
    assert needs == {kind: alone.get(kind, ["group"]) for kind in KINDS}
    assert AdvantageConfig(kl={"coef": 0.1}).needs_reference and AdvantageConfig(distill_coef=0.1).needs_teacher


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gamma": 0.9}, "gamma is not read by kind grpo, only by gae, per_turn, reinforce_plus_plus"),
        ({"kind": "remax", "lam": 0.9}, "lam is not read by kind remax"),
        ({"kind": "rloo", "normalize_std": False}, "normalize_std is not read by kind rloo"),
        ({"kind": "rloo", "bootstrap_truncated": True}, "bootstrap_truncated is not read"),
        ({"components": {"a": 1.0}}, "components is not read by kind grpo, only by gdpo"),
        ({"kind": "gdpo"}, "gdpo needs components"),
        ({"kind": "gdpo", "components": {"a": 0.0}}, "gdpo needs components"),
        ({"kind": "gdpo", "components": {"a": 1.0}, "kl": {"coef": 0.1}}, "set trainer.loss.kl_coef"),
        ({"kind": "max_rl", "kl": {"coef": 0.1}}, "set trainer.loss.kl_coef"),
        ({"kl": {"target": 6.0}}, "set kl.coef above 0"),
        ({"kl": {"coef": math.inf}}, "finite"),
        ({"kind": "ppo"}, "gae"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict, words: str):
    with pytest.raises(ValidationError, match=words):
        AdvantageConfig(**settings)


def test_one_completion_is_enough_where_samples_are_not_compared():
    fixed = ["model=m", "data={train: a.parquet, prompts_per_step: 4}", "reward.scorers=[{kind: exact}]"]
    for kind in [kind for kind in KINDS if AdvantageConfig(kind=kind).needs_group]:
        with pytest.raises(InvalidInput, match=f"advantage.kind {kind} .*must be at least 2"):
            load(Config, [*fixed, f"advantage.kind={kind}", "rollout.completions_per_prompt=1"])
        load(Config, [*fixed, f"advantage.kind={kind}", "rollout.completions_per_prompt=2"])
    load(Config, [*fixed, "advantage.kind=reinforce_plus_plus", "rollout.completions_per_prompt=1"])


def turns(*rewards: float, rest: float = 0.0) -> dict[str, Any]:
    """Returns an episode whose turns have two tokens each, with one token of the environment between them.

    `rewards` are those of the turns, and `rest` is what the episode earns beside them.
    """
    begins = [3 * turn for turn in range(len(rewards))]
    episode = {
        "turn_begins": begins,
        "turn_ends": [begin + 2 for begin in begins],
        "turn_rewards": list(rewards),
        "environment": "e 1",
    }
    mask = [YES, YES, NO] * len(rewards)
    return row(sum(rewards) + rest, len(mask) - 1, loss_mask=mask[:-1], **episode)


def test_a_turn_is_credited_with_the_rewards_from_it_on():
    # Returns with discount 0.5: 1 + 0.5 * (0 + 0.5 * (2 + 4)) = 2.5, 3, 6; and 1, 0, 0 for the other.
    rows = [turns(1, 0, 2, rest=4), turns(1, 0, 0)]
    first, second = computed(rows, kind="per_turn", gamma=0.5)
    assert first == [0.75, 0.75, 0, 1.5, 1.5, 0, 3, 3]
    assert second == [-advantage for advantage in first]


def test_turns_between_which_the_environment_says_nothing_are_turns():
    both = row(3, 2, turn_begins=[0, 1], turn_ends=[1, 2], turn_rewards=[1.0, 2.0], environment="e 1")
    other = row(0, 2, turn_begins=[0, 1], turn_ends=[1, 2], turn_rewards=[1.0, -1.0], environment="e 1")
    assert computed([both, other], kind="per_turn") == [[1.5, 1.5], [-1.5, -1.5]]  # returns 3 and 2, 0 and -1


@pytest.mark.parametrize("kind", ["per_turn", "dr_grpo", "grpo", "rloo"])
def test_a_further_turn_costs_nothing_by_itself(kind: str):
    """Episodes that earn the same have no advantage over one another, however many turns they take.

    A baseline for each turn index, summed over the episode, would give the long one less: at indices that only it
    reaches its reward would be compared with itself, and at the others with a mean of which it earned only a part
    (verl#7244).
    """
    rows = [turns(1), turns(0, 1), turns(0, 0, 0, 1)]
    assert not any(itertools.chain(*computed(rows, kind=kind)))


def test_a_token_is_credited_with_no_turn_before_its_own():
    # Token by token, with discount 0.5 and the environment's tokens left out: the turns' rewards 8 and 16 are at the
    # second tokens, and the 16 that the episode earns beside them at the last one.
    config = {"kind": "reinforce_plus_plus", "gamma": 0.5, "whiten": "none"}
    assert computed([turns(8, 16, rest=16)], **config) == [[8, 16, 0, 16, 32]]
    critic = {"values": [0.0] * 5}
    assert computed([turns(8, 16, rest=16) | critic], **config | {"kind": "gae"}) == [[8, 16, 0, 16, 32]]
    # The greedy completion has one reward for all its turns: 40 - 30 at every token.
    assert computed([turns(8, 16, rest=16) | {"baseline": 30.0}], kind="remax") == [[10, 10, 0, 10, 10]]
    # A turn without a trained token: its reward is in the rest.
    cut = turns(8, 16, 4) | {"loss_mask": [YES, YES, NO, NO, NO, NO, YES, YES]}
    assert computed([cut], **config) == [[6.5, 13, 0, 0, 0, 0, 10, 20]]
