"""Computes advantages from rewards with pure functions, chosen by `advantage.kind`, and whitens them.

An estimator maps Samples to one float64 advantage per trained token [M]. Every sample of a batch counts in baselines,
even if loss_mask excludes all its tokens: the mask removes the sample's gradient, but its reward still tells how hard
the prompt is (overlong filtering, arXiv 2503.14476).
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from services.common.config.advantage import AdvantageConfig
from services.common.errors import InvalidInput
from services.common.import_path import call_function, require_function
from services.common.rewards import is_constant
from services.coordinator.rl.advantages.samples import Samples


def centered(numbers: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Subtracts the mean of each group (0, 1, ...); exactly 0 if all numbers of a group are equal up to rounding."""
    first = np.zeros(groups.max(initial=-1) + 1)
    first[groups] = numbers  # one number of each group: large numbers lose no digits in the mean of the differences
    relative = numbers - first[groups]
    relative[is_constant(numbers, groups)[groups]] = 0.0
    return relative - _mean(relative, groups, np.ones(len(groups)))


def centered_rewards(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns r - mean. Dividing by the std would favor too easy and too hard prompts (arXiv 2503.20783)."""
    return samples.shared(centered(samples.net_rewards_S, samples.group_S))


def grpo(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns (r - mean) / (std + eps), with the sample standard deviation (arXiv 2402.03300, section 4.1.2)."""
    if not config.normalize_std:
        return centered_rewards(samples, config)
    return samples.shared(_standardized(samples.net_rewards_S, samples.group_S, config.eps))


def gdpo(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns the weighted sum of each component's (c - mean) / (std + eps), over samples shifted and scaled to 1.

    In the sum of rewards, different components may add up to the same number, and one of a large spread hides the
    others (arXiv 2601.05242, section 3).

    Raises:
        InvalidInput: A sample lacks a component.
    """
    total_S = np.zeros(len(samples.rewards_S))
    for name, weight in config.components.items():
        total_S += weight * _standardized(samples.component(name), samples.group_S, config.eps)
    return samples.shared(_standardized(total_S, np.zeros(len(total_S), int), config.eps))


def _standardized(numbers: np.ndarray, groups: np.ndarray, eps: float) -> np.ndarray:
    centered_S, size = centered(numbers, groups), np.bincount(groups)
    # `size` is above 1: groups of one sample are refused (Samples.of).
    std = np.sqrt(np.bincount(groups, centered_S**2) / (size - 1))
    return centered_S / (std + eps)[groups]


def max_rl(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns (r - mean) / (mean + eps) (arXiv 2602.02710, section 3).

    With rewards of 0 and 1, n samples of a prompt then ascend its log pass rate to the nth order: log p = log(1 - q) is
    minus the sum of q^k / k, and dr_grpo ascends only the first of these terms.

    Raises:
        InvalidInput: A reward is negative, so that the mean is no rate of success.
    """
    if samples.rewards_S.min(initial=0.0) < 0:
        raise InvalidInput(
            f"reward: advantage.kind max_rl divides by the mean reward of a group, and a reward is "
            f"{samples.rewards_S.min():g}; use rewards that are not negative, or another kind",
            field="reward",
        )
    mean_S = _mean(samples.rewards_S, samples.group_S, np.ones(len(samples.rewards_S)))
    return samples.shared(centered(samples.rewards_S, samples.group_S) / (mean_S + config.eps))


def rloo(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns r - mean of the others, which is n / (n - 1) * (r - mean of all n) (arXiv 2402.14740, section 2.2)."""
    size_S = np.bincount(samples.group_S)[samples.group_S]
    centered_S = centered(samples.net_rewards_S, samples.group_S)
    return samples.shared(centered_S * size_S / (size_S - 1))


def opo(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns r - mean weighted by trained tokens, the baseline of least variance (arXiv 2505.23585)."""
    centered_S = centered(samples.net_rewards_S, samples.group_S)
    return samples.shared(centered_S - _mean(centered_S, samples.group_S, samples.count_S))


def gpg(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns (r - mean) * samples / samples in groups of differing rewards; others get 0 (arXiv 2504.02546)."""
    centered_S = centered(samples.net_rewards_S, samples.group_S)
    # `centered` makes exact zeros where rewards are equal up to rounding.
    mixed = np.bincount(samples.group_S, centered_S != 0) > 0
    num_mixed = np.count_nonzero(mixed[samples.group_S])
    return samples.shared(centered_S * (len(centered_S) / max(num_mixed, 1)))


def _mean(numbers: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    total = np.bincount(groups, weights)
    return (np.bincount(groups, weights * numbers) / np.where(total > 0, total, 1))[groups]


def per_turn(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Subtracts from each turn's discounted return the mean over the same turn of the group; a turn's tokens share it.

    Turn k of K (from 0) has the return sum over j >= k of gamma^(j - k) * r_j. r_j is the environment's reward for
    turn j; the rest of the sample's reward, minus its KL penalties, is added to the last turn's. With one turn per
    sample this equals dr_grpo.

    Turns are compared at the same index (arXiv 2505.11821), among the samples that have it: what is left to earn
    differs from turn to turn, so that a mean over all turns would favor the first ones of samples that earn the same.
    A turn that no other sample has gets 0. Returns are compared and not the turns' own rewards: a sum of rewards minus
    their means would subtract as many means as the policy takes turns, which favors few turns or many
    (github.com/verl-project/verl/issues/7244). What is subtracted from a return here depends on nothing that the policy
    does from that turn on, apart from the sample's own part of the mean.
    """
    starts_M, turn_rewards_K = samples.turns
    sample_K = samples.sample_M[starts_M]  # the sample of each of the batch's K turns
    rewards_K = turn_rewards_K.copy()
    of_turns_S = np.bincount(sample_K, rewards_K, minlength=len(samples.rewards_S))
    rest_S = samples.net_rewards_S - of_turns_S
    is_last_K = np.append(np.diff(sample_K) > 0, True)[: len(sample_K)]
    rewards_K[is_last_K] += rest_S[sample_K[is_last_K]]
    for k in range(len(rewards_K) - 2, -1, -1):
        if not is_last_K[k]:
            rewards_K[k] += config.gamma * rewards_K[k + 1]
    first_K = np.flatnonzero(np.diff(sample_K, prepend=-1))  # index among K of each trained sample's first turn
    index_K = np.arange(len(sample_K)) - np.repeat(first_K, np.diff(first_K, append=len(sample_K)))
    untrained = [turn for sample in samples.untrained_turns for turn in _returns(samples, sample, config.gamma)]
    samples_U, indices_U, returns_U = np.array(untrained).reshape(-1, 3).T
    returns_K, index_K = np.append(rewards_K, returns_U), np.append(index_K, indices_U.astype(int))
    groups_K = samples.group_S[np.append(sample_K, samples_U.astype(int))]
    # Centered within each pair of prompt group and turn index, which this product numbers; then spread over each turn's
    # tokens.
    return centered(returns_K, groups_K * (index_K.max(initial=0) + 1) + index_K)[np.cumsum(starts_M) - 1]


def _returns(samples: Samples, sample: int, gamma: float) -> Iterator[tuple[int, int, float]]:
    """Yields (sample, index, return) of each turn of a sample without a trained token, or once if it has no turn."""
    rewards = [turn.reward for turn in samples.untrained_turns[sample]] or [0.0]
    rewards[-1] += samples.net_rewards_S[sample] - sum(rewards)
    later = 0.0
    for index in range(len(rewards) - 1, -1, -1):
        later = rewards[index] + gamma * later
        yield sample, index, later


def discounted_sums(numbers_M: np.ndarray, count_S: np.ndarray, discount: float) -> np.ndarray:
    """Computes y_t = x_t + discount * y_(t+1) within each sample; sample s is the next count_S[s] of `numbers_M`.

    Processes all samples together from their ends, without padding: M additions in max(count_S) vector operations.
    """
    sums_M = numbers_M.copy()
    order = np.argsort(-count_S, kind="stable")
    last, descending = np.cumsum(count_S)[order] - 1, -count_S[order]
    for back in range(1, int(count_S.max(initial=0))):
        index = last[: np.searchsorted(descending, -back)] - back  # in samples with more than `back` tokens
        sums_M[index] += discount * sums_M[index + 1]
    return sums_M


def reinforce_plus_plus(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Sums the discounted token rewards from t on (arXiv 2501.03262); whitened over the batch by default.

    The reward of a turn is at its last token, so no token gets the rewards of turns before its own.
    """
    return discounted_sums(samples.token_rewards_M, samples.count_S, config.gamma)


def remax(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns the reward minus the KL penalties from t on, minus the greedy completion's reward (arXiv 2310.10505).

    Both rewards are of the whole sample: later turns alone cannot be compared with all turns of the greedy completion.
    """
    assert samples.baseline_S is not None
    penalties_M = discounted_sums(samples.penalty_M, samples.count_S, 1.0)
    return samples.to_tokens(samples.rewards_S - samples.baseline_S) - penalties_M


def gae(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Sums r_t + gamma * V_(t+1) - V_t, discounted by gamma * lam, over the trained tokens of each sample.

    V_t is the value of the state before token t. Tokens that are not trained on are skipped, as they are part of the
    next state. The reward of a turn is that of its last token. The value after the last token is 0. For a truncated
    sample with bootstrap_truncated it is the value before the last token, because the critic does not evaluate the
    state after it.
    """
    values_M = samples.values_M
    assert values_M is not None
    # The last token of a sample gets a value of the next sample here, which is replaced below.
    next_M = np.roll(values_M, -1)
    bootstraps = samples.truncated_S[samples.trained_S] & config.bootstrap_truncated
    next_M[samples.last] = np.where(bootstraps, values_M[samples.last], 0.0)
    errors_M = samples.token_rewards_M + config.gamma * next_M - values_M
    return discounted_sums(errors_M, samples.count_S, config.gamma * config.lam)


def distill(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns 0, the advantage of no reward: `compute_advantages` adds the teacher's to every kind."""
    return np.zeros(len(samples.sample_M))


_FIELD = "advantage.import_path"


def python(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Calls the user's function, which returns one float64 advantage per trained token [M] like every kind.

    Raises:
        InvalidInput: The function cannot be imported, raises, or its result is not finite or not of shape [M].
    """
    result = call_function(config.import_path, (samples, config), config.kwargs, field=_FIELD)
    try:
        advantages_M = np.asarray(result, np.float64)
    except (TypeError, ValueError) as error:  # numbers in lists of several lengths, or no numbers
        kind = type(result).__name__
        problem = f"returned a {kind}, of which no array can be made ({error}); it must return only an array"
        raise InvalidInput(f"{_FIELD}: {config.import_path} {problem}", field=_FIELD) from error
    if advantages_M.shape != samples.sample_M.shape or not np.isfinite(advantages_M).all():
        raise InvalidInput(
            f"{_FIELD}: {config.import_path} returned an array of shape {list(advantages_M.shape)}; it must return "
            f"one finite number for each of the {samples.sample_M.size} trained tokens",
            field=_FIELD,
        )
    return advantages_M


def require_importable(config: AdvantageConfig) -> None:
    """Checks, before a run starts, that the user's function exists, if the config names one.

    Raises:
        InvalidInput: The function cannot be imported, or does not take its arguments.
    """
    if config.import_path:
        require_function(config.import_path, ("samples", "config"), config.kwargs, field=_FIELD)


def whiten(advantages_M: np.ndarray, samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns (a - mean) / (std + eps) over the trained tokens of the batch or of each group, with the population std.

    Statistics are per token, not per sample: a long sample weighs as much as in a loss that is a mean over tokens.
    Advantages that are all equal up to rounding become exactly 0.
    """
    if config.whitening == "none" or not advantages_M.size:
        return advantages_M
    group_M = samples.to_tokens(samples.group_S)
    if config.whitening == "batch":
        group_M = np.zeros_like(group_M)
    count = np.maximum(np.bincount(group_M), 1)  # the count is 0 if all tokens of a group are masked
    centered_M = centered(advantages_M, group_M)
    std = np.sqrt(np.bincount(group_M, centered_M**2) / count)
    return centered_M / (std + config.eps)[group_M]


Estimator = Callable[[Samples, AdvantageConfig], np.ndarray]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": centered_rewards,
    "gdpo": gdpo,
    "max_rl": max_rl,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "per_turn": per_turn,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": centered_rewards,  # and whitening over the batch
    "remax": remax,
    "gae": gae,
    "distill": distill,
    "python": python,
}


def compute_advantages(batch: pa.Table, config: AdvantageConfig, *, kl_coef: float | None = None) -> pa.Table:
    """Returns `batch` (SAMPLE_SCHEMA) with `advantages` and, with a critic, `returns`, one per token.

    Both are 0 where loss_mask is false. The returns, the critic's targets, are advantages before whitening + values.
    `kl_coef` is this step's coefficient if it is adaptive (samples.coef_after); None means `config.kl.coef`.

    Raises:
        InvalidInput: A column that the kind needs is missing or differs in length from tokens, or the kind compares
            the samples of a group and a group has only one; `field` names the column.
    """
    samples = Samples.of(batch, config, config.kl.coef if kl_coef is None else kl_coef)
    advantages_M = ESTIMATORS[config.kind](samples, config)
    if samples.values_M is not None:
        batch = _with_column(batch, "returns", samples.to_lists(advantages_M + samples.values_M))
    advantages_M = whiten(advantages_M, samples, config)
    if samples.teacher_kl_M is not None:
        # On samples of the policy, this is the gradient of KL(policy || teacher) of the next token in every state that
        # was visited. What a token does to later states is left out, a discount of 0 (arXiv 2306.13649, section 3).
        advantages_M = advantages_M - config.teacher_coef * samples.teacher_kl_M
    return _with_column(batch, "advantages", samples.to_lists(advantages_M))


def _with_column(batch: pa.Table, name: str, column: pa.Array) -> pa.Table:
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, batch.schema.field(index), column)
