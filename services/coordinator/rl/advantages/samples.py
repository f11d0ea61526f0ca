"""Reads the columns of a batch as flat arrays. Suffixes: S samples, N completion tokens, M trained tokens.

A sample of an agent has several rows, R in all, whose trained tokens follow each other as those of one sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.common.batches import begins_of_samples
from services.common.config.advantage import AdvantageConfig, KlConfig
from services.common.errors import InvalidInput

# The same bounds as in the loss.
_MAX_LOG_RATIO, _MAX_K3 = 20.0, 10.0


def token_kl(logprobs: np.ndarray, ref_logprobs: np.ndarray, kind: str) -> np.ndarray:
    """Estimates KL(policy || reference), or to a teacher, in nats from the sampled tokens' log-probabilities.

    k1, k2 and k3 are Schulman's estimators (2020, "Approximating KL divergence"): k1 is unbiased and may be negative,
    k2 is biased and k3 unbiased, both non-negative; abs is |k1|. As in the loss, k3 is at most 10.
    """
    log_ratio = logprobs - ref_logprobs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    if kind == "k3":
        bounded = log_ratio.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return np.minimum(np.expm1(-bounded) + bounded, _MAX_K3)
    return np.abs(log_ratio)


@dataclass(frozen=True)
class Turn:
    """What the policy sampled at once: tokens from `begin` to `end` of all N, and the environment's reward."""

    begin: int
    end: int
    reward: float


@dataclass(frozen=True)
class Samples:
    """The estimators' input, in the order of the batch. Tokens that loss_mask excludes are observations."""

    rewards_S: np.ndarray  # float64, before KL penalties
    group_S: np.ndarray  # index of the sample's prompt group, from 0 without gaps
    count_S: np.ndarray  # number of trained tokens of each sample; may be 0
    truncated_S: np.ndarray  # whether the sample was cut off at max_tokens
    mask_N: np.ndarray  # whether each token is trained on
    offsets_R: np.ndarray  # int32 [R + 1], index among all N of each row's first token
    begins_S: np.ndarray  # index among all N of each sample's first token
    penalty_M: np.ndarray  # KL penalty of each token, multiplied by the coefficient
    penalty_S: np.ndarray  # of all tokens of a sample, also if none of them is trained
    untrained_turns: Mapping[int, Sequence[Turn]]  # by sample, of those without a trained token
    values_M: np.ndarray | None  # critic's value of the state before each token; None if the kind needs no critic
    teacher_kl_M: np.ndarray | None  # log policy - log teacher of each token; None if the run has no teacher
    components_S: pa.ChunkedArray  # map of each sample's reward components
    baseline_S: np.ndarray | None  # reward of the prompt's greedy completion; None if the kind needs none
    turn_begins: pa.ChunkedArray  # of each row; null without an environment
    turn_rewards: pa.ChunkedArray
    is_final: bool  # whether nothing more is computed from advantages, which a batch holds as float32

    @classmethod
    def of(cls, batch: pa.Table, config: AdvantageConfig, kl_coef: float) -> Self:
        """Converts `batch`, and checks that it has the columns that `config` needs.

        Raises:
            InvalidInput: See `compute_advantages`.
        """
        first_S = begins_of_samples(batch)
        _, group_S = np.unique(batch["group"].to_numpy()[first_S], return_inverse=True)
        if config.needs_group and np.bincount(group_S).min(initial=2) < 2:
            raise InvalidInput(
                f"group: advantage.kind {config.kind} compares the samples of a prompt with each other, but a group "
                "has only one; increase rollout.completions_per_prompt",
                field="group",
            )
        lengths_R: np.ndarray = pc.list_value_length(batch["tokens"]).to_numpy()
        offsets_R = np.concatenate([[0], np.cumsum(lengths_R)]).astype(np.int32)
        mask_N, begins_S = trained_mask(batch), offsets_R[first_S]
        kind = f"advantage.kind {config.kind}"
        count_S = _trained_counts(mask_N, begins_S)
        untrained_turns = {s: list(_turns(batch, s, first_S, offsets_R)) for s in np.flatnonzero(count_S == 0).tolist()}
        # Zeros that take no memory, since a batch may have 10^8 tokens.
        penalty_M, penalty_S = np.broadcast_to(0.0, count_S.sum()), np.zeros(len(count_S))
        if config.needs_reference:
            penalty_N = kl_coef * kl_of(batch, config.kl.kind, mask_N=np.ones(len(mask_N), bool))
            penalty_M = penalty_N[mask_N]
            penalty_S = np.bincount(np.repeat(np.arange(len(count_S)), count_S), penalty_M, minlength=len(count_S))
            for sample, turns in untrained_turns.items():
                penalty_S[sample] = sum(penalty_N[turn.begin : turn.end].sum() for turn in turns)
        return cls(
            rewards_S=batch["reward"].to_numpy()[first_S],
            group_S=group_S,
            count_S=count_S,
            truncated_S=pc.equal(batch["finish_reason"], "length").to_numpy()[first_S],
            mask_N=mask_N,
            offsets_R=offsets_R,
            begins_S=begins_S,
            penalty_M=penalty_M,
            penalty_S=penalty_S,
            untrained_turns=untrained_turns,
            values_M=per_token(batch, "values", kind)[mask_N] if config.needs_values else None,
            teacher_kl_M=kl_of(batch, "k1", "teacher_logprobs") if config.needs_teacher else None,
            components_S=batch["components"].take(first_S),
            baseline_S=_required(batch, "baseline", kind).to_numpy()[first_S] if config.needs_baseline else None,
            turn_begins=batch["turn_begins"],
            turn_rewards=batch["turn_rewards"],
            is_final=config.whitening == "none" and not (config.needs_values or config.needs_teacher),
        )

    def component(self, name: str) -> np.ndarray:
        """Returns the reward component `name` of each sample, float64 [S].

        Raises:
            InvalidInput: A sample has none.
        """
        numbers_S = pc.map_lookup(self.components_S, name, "first")
        if numbers_S.null_count:
            message = f"components: advantage.components.{name}: {numbers_S.null_count} samples have no such component"
            raise InvalidInput(message, field="components")
        return numbers_S.to_numpy()

    def to_tokens(self, numbers_S: np.ndarray) -> np.ndarray:
        """Returns the number of its sample for each trained token, [M]."""
        return np.repeat(numbers_S, self.count_S)

    def shared(self, advantages_S: np.ndarray) -> np.ndarray:
        """Returns the advantage of its sample for each trained token, [M], in half the memory if that loses nothing."""
        return self.to_tokens(advantages_S.astype(np.float32) if self.is_final else advantages_S)

    @cached_property
    def sample_M(self) -> np.ndarray:
        return self.to_tokens(np.arange(len(self.count_S)))

    @cached_property
    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns where turns start, bool [M], and the reward of each turn that has trained tokens, float64 [K].

        Without an environment, each run of trained tokens is a turn, with a reward of 0.
        """
        mask_N = self.mask_N
        counts_R = pc.fill_null(pc.list_value_length(self.turn_begins), 0).to_numpy()
        begins_K = np.repeat(self.offsets_R[:-1], counts_R) + pc.list_flatten(self.turn_begins).to_numpy()
        starts_N = np.append(True, ~mask_N[:-1])[: len(mask_N)]
        starts_N[self.begins_S[self.begins_S < len(mask_N)]] = True
        starts_N[begins_K] = True  # turns between which the environment added nothing
        rewards_N = np.zeros(len(mask_N))
        rewards_N[begins_K] = pc.list_flatten(self.turn_rewards).to_numpy()
        return starts_N[mask_N], rewards_N[starts_N & mask_N]

    @property
    def net_rewards_S(self) -> np.ndarray:
        return self.rewards_S - self.penalty_S

    @property
    def trained_S(self) -> np.ndarray:
        return self.count_S > 0

    @property
    def last(self) -> np.ndarray:
        """Returns the index of the last trained token, among all M, of each sample that has trained tokens."""
        return np.cumsum(self.count_S)[self.trained_S] - 1

    @property
    def token_rewards_M(self) -> np.ndarray:
        """Returns each token's reward: minus its KL penalty, plus the reward that it ends with.

        That is the environment's reward of a turn at the turn's last trained token, and the rest of the sample's reward
        at the sample's last one.
        """
        turn_starts_M, turn_rewards_K = self.turns
        starts, rewards_M = np.flatnonzero(turn_starts_M), -self.penalty_M
        ends = np.append(starts[1:], len(rewards_M))[: len(starts)] - 1
        rewards_M[ends] += turn_rewards_K
        of_turns_S = np.bincount(self.sample_M[starts], turn_rewards_K, minlength=len(self.rewards_S))
        rewards_M[self.last] += (self.rewards_S - of_turns_S)[self.trained_S]
        return rewards_M

    def to_lists(self, numbers_M: np.ndarray) -> pa.Array:
        """Returns list<float> [R]: `numbers_M` at the trained tokens, 0 at the others."""
        flat_N = numbers_M.astype(np.float32, copy=False)
        if len(numbers_M) < len(self.mask_N):
            flat_N = np.zeros(len(self.mask_N), np.float32)
            flat_N[self.mask_N] = numbers_M
        return pa.ListArray.from_arrays(pa.array(self.offsets_R), pa.array(flat_N))


def trained_mask(batch: pa.Table) -> np.ndarray:
    """Returns loss_mask as bool [N]; all true for a sample without one.

    Raises:
        InvalidInput: A mask differs in length from its sample's tokens.
    """
    column, lengths_S = batch["loss_mask"], pc.list_value_length(batch["tokens"]).to_numpy()
    has_mask_S = column.is_valid().to_numpy()
    _refuse(has_mask_S & (pc.fill_null(pc.list_value_length(column), 0).to_numpy() != lengths_S), "loss_mask")
    mask_N = np.ones(lengths_S.sum(), bool)
    if not has_mask_S.any():
        return mask_N
    mask_N[np.repeat(has_mask_S, lengths_S)] = pc.list_flatten(column).to_numpy()
    return mask_N


def _trained_counts(mask_N: np.ndarray, begins_S: np.ndarray) -> np.ndarray:
    # Estimators of a sample's advantage read nothing of a token: batches have 10^8 of them.
    spans = zip(begins_S, np.append(begins_S[1:], len(mask_N)), strict=False)
    return np.array([np.count_nonzero(mask_N[begin:end]) for begin, end in spans], np.int64)


def _turns(batch: pa.Table, sample: int, first_S: np.ndarray, offsets_R: np.ndarray) -> Iterator[Turn]:
    """Yields the turns of a sample. Each is there once, though an agent may have sent it again with later calls."""
    columns, seen = ["turn_begins", "turn_ends", "turn_rewards", "calls"], set[int]()
    end = first_S[sample + 1] if sample + 1 < len(first_S) else len(offsets_R) - 1
    for number, row in enumerate(batch.select(columns).slice(first_S[sample], end - first_S[sample]).to_pylist()):
        offset, row_end = offsets_R[first_S[sample] + number : first_S[sample] + number + 2].tolist()
        if row["turn_begins"] is None:
            yield Turn(offset, row_end, 0.0)
            continue
        calls = [call["number"] for call in row["calls"] or ()] or range(len(row["turn_begins"]))
        for call, begin, turn_end, reward in zip(calls, *(row[name] for name in columns[:3]), strict=True):
            if call not in seen:
                yield Turn(offset + begin, offset + turn_end, reward)
            seen.add(call)


def num_trained_samples(batch: pa.Table) -> int:
    offsets_R = np.concatenate([[0], np.cumsum(pc.list_value_length(batch["tokens"]).to_numpy())])
    return int(np.count_nonzero(_trained_counts(trained_mask(batch), offsets_R[begins_of_samples(batch)])))


def per_token(batch: pa.Table, name: str, why: str) -> np.ndarray:
    """Returns a column with one number per token, as float64 [N].

    Raises:
        InvalidInput: The column, which `why` needs, is missing or differs in length from tokens.
    """
    column = _required(batch, name, why)
    _refuse(pc.not_equal(pc.list_value_length(column), pc.list_value_length(batch["tokens"])).to_numpy(), name)
    return pc.list_flatten(column).to_numpy().astype(np.float64)


def kl_of(batch: pa.Table, kind: str, other: str = "ref_logprobs", *, mask_N: np.ndarray | None = None) -> np.ndarray:
    """Returns the estimate of the KL from policy to another model at each trained token of `batch`, float64 [M].

    `other` is the column with that model's log-probabilities. With `mask_N`, other tokens are chosen. There is no
    coefficient in the result.

    Raises:
        InvalidInput: `other` or logprobs are missing or differ in length from tokens.
    """
    why = f"the KL to {'the teacher' if other == 'teacher_logprobs' else 'the reference'}"
    logprobs_N, other_N = per_token(batch, "logprobs", why), per_token(batch, other, why)
    mask_N = trained_mask(batch) if mask_N is None else mask_N
    return token_kl(logprobs_N[mask_N], other_N[mask_N], kind)


def _required(batch: pa.Table, name: str, why: str) -> pa.ChunkedArray:
    column = batch[name]
    if column.null_count:
        raise InvalidInput(f"{name}: {why} needs it, and {column.null_count} samples have none", field=name)
    return column


def _refuse(bad_S: np.ndarray, name: str) -> None:
    if bad_S.any():
        raise InvalidInput(f"{name}: {int(bad_S.sum())} samples differ in length from tokens", field=name)


# At most so much may one step change the coefficient, relatively: a measured KL is noisy.
_MAX_ERROR = 0.2


def coef_after(before: Mapping[str, float] | None, config: KlConfig) -> float:
    """Returns a step's coefficient from the previous step's `kl_record`; the configured one without record or target.

    It is coef * (1 + clip(measured / target - 1, -0.2, 0.2) * num_samples / horizon), arXiv 1909.08593, section 2.2.
    """
    if before is None or config.target is None:
        return config.coef
    error = min(max(before["kl_per_sample"] / config.target - 1, -_MAX_ERROR), _MAX_ERROR)
    # A batch that is larger than the horizon cannot change the sign.
    return before["kl_coef"] * (1 + error * min(before["num_samples"] / config.horizon, 1.0))


def kl_record(batch: pa.Table, coef: float, config: KlConfig) -> dict[str, float]:
    """Returns what `coef_after` needs: the coefficient, the mean KL in nats per trained sample, and their number.

    Raises:
        InvalidInput: ref_logprobs are missing.
    """
    num_samples = num_trained_samples(batch)
    kl = kl_of(batch, config.kind).sum() / max(num_samples, 1)
    return {"kl_coef": coef, "kl_per_sample": float(kl), "num_samples": float(num_samples)}
