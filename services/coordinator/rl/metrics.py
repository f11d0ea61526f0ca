"""Computes the metrics of a step, and warns of steps from which little is learned.

Batch metrics depend only on the batch, so replaying a step reproduces them.
"""

import logging
import math
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.common.batches import begins_of_samples, decode_sampling_masks
from services.common.config.operation import WarningsConfig
from services.common.rewards import all_equal, is_constant
from services.coordinator.rl.advantages.samples import kl_of, num_trained_samples, per_token, trained_mask
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]
_COLLAPSE, _FIRST_ENTROPY = "warning/entropy_collapse", "warning/first_entropy"
_RECOVERS = 1.5  # the share of its limit above which an entropy has recovered
_UNMIXED, _DROPPED = "warning/steps_without_mixed_group", "warning/dropped_groups"
# Metrics of failures -> what they are in a warning: groups by scorer and reason, and tries of an episode by reason.
_FAILED = {"sampling/failed/": "", "environment/failed_": "environment/"}


def warning_metrics(step: int, metrics: Metrics, before: Metrics, settings: WarningsConfig) -> dict[str, float]:
    """Logs the warnings of `step`, which has `metrics`, and returns their metrics.

    `before` are the metrics of the step before it, which this function had added to; empty for the first.
    """
    collapse = _warn_of_collapse(step, metrics, before, settings.entropy_ratio)
    # A teacher needs no rewards, and some advantages compare with other prompts or with values.
    others = "teacher_kl/token_mean" in metrics or any(metrics.get(f"advantage/{name}") for name in ("min", "max"))
    learns = metrics["reward/mixed_groups"] or others
    count = 0.0 if learns else before.get(_UNMIXED, 0.0) + 1
    # Only once, and not in every later step.
    if (most := settings.steps_without_mixed_group) and count == most:
        log.warning(
            "step %d: no group had different rewards in %d steps (mean reward %.3g), so nothing was learned from "
            "them: use prompts of another difficulty, more samples per prompt, or selection.dynamic "
            "(observability.warnings.steps_without_mixed_group)",
            *(step, most, metrics["reward/mean"]),
        )
    share = _warn_of_dropped(step, metrics, settings.dropped_groups)
    return {**collapse, _UNMIXED: count, _DROPPED: share}


def _warn_of_collapse(step: int, metrics: Metrics, before: Metrics, ratio: float) -> dict[str, float]:
    if "train/entropy" not in metrics:
        return {}
    now, first = metrics["train/entropy"], before.get(_FIRST_ENTROPY, metrics["train/entropy"])
    was_collapsed = bool(before.get(_COLLAPSE))
    # An entropy that moves around its limit is warned of once.
    collapsed = now < ratio * first * (_RECOVERS if was_collapsed else 1.0)
    if collapsed and not was_collapsed:
        log.warning(
            "step %d: the entropy collapses: %.3g nats per token, after %.3g in the first step; samples of a prompt "
            "become alike, and rewards stop rising: lower trainer.optim.lr, set trainer.loss.entropy_coef, or raise "
            "the clip range (observability.warnings.entropy_ratio)",
            *(step, now, first),
        )
    return {_FIRST_ENTROPY: first, _COLLAPSE: float(collapsed)}


def _warn_of_dropped(step: int, metrics: Metrics, most: float) -> float:
    """Warns of groups without a score, with the scorer or environment that failed most often. Returns their share."""
    dropped = metrics.get("sampling/dropped_no_score", 0.0)
    share = dropped / metrics["sampling/prompts"] if metrics.get("sampling/prompts") else 0.0
    if share > most:
        pairs = [(name, prefix) for name in metrics for prefix in _FAILED if name.startswith(prefix)]
        failed = {_FAILED[prefix] + name.removeprefix(prefix): metrics[name] for name, prefix in pairs}
        why = ", ".join(f"{name} in {failed[name]:g}" for name in sorted(failed, key=lambda name: -failed[name]))
        log.warning(
            "step %d: %.0f%% of the prompt groups (%g) were dropped because a sample had no score: %s; the log has "
            "each failure (observability.warnings.dropped_groups)",
            *(step, 100 * share, dropped, why),
        )
    return share


_FLOAT32 = 1e-6  # resolution of a batch's columns of float32, a few times their spacing


def step_metrics(run: Run, trained: Mapping[str, float], batch: pa.Table) -> dict[str, float]:
    """Returns all metrics of the current step: of its batch, its update (`trained`), its timing and its selection."""
    metrics = batch_metrics(batch) | {f"train/{name}": value for name, value in trained.items()} | run.clock.metrics()
    metrics |= (run.record.ledger.last(Kind.SELECTED, run.version) or {}).get("metrics", {})
    kl = (run.record.ledger.last(Kind.COLLECTED, run.version) or {}).get("kl")
    metrics |= {"kl/coef": kl["kl_coef"], "kl/penalized_per_sample": kl["kl_per_sample"]} if kl else {}
    metrics |= _idle(metrics)
    if not run.record.batch_is_from_disk and not run.config.trainer.lag.versions:  # it generates another step's batch
        metrics["time/tokens_per_s"] = metrics["batch/tokens"] / max(metrics["time/generating_s"], 1e-9)
    before = run.record.ledger.last(Kind.FINISHED, run.version) or {}
    return metrics | warning_metrics(run.version + 1, metrics, before, run.config.observability.warnings)


def _idle(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of the step in which the replicas did not generate, and the trainer did not train.

    The trainer's own time is that of its updates, as it measured them; while a streamed update waits for blocks, it is
    idle. Publishing, scoring and forwards of other models count as idle.
    """
    step_s, generate_s = metrics["time/step_s"], metrics.get("time/generate_busy_s", 0.0)
    called_s = metrics.get("time/train_busy_s", 0.0)
    train_s = min(metrics.get("train/train_s", called_s), called_s)
    busy = {"time/train_busy_s": train_s} if called_s else {}
    idle = {"time/idle_rollout_s": step_s - generate_s, "time/idle_trainer_s": step_s - train_s}
    return busy | {name: max(seconds, 0.0) for name, seconds in idle.items()}


def batch_metrics(batch: pa.Table) -> dict[str, float]:
    """Returns metrics of a batch (SAMPLE_SCHEMA): of rewards, lengths and, if present, advantages, KL and values.

    Lengths are those of all that follows the prompt, so an environment's tokens count.
    """
    firsts = begins_of_samples(batch)  # a sample of an agent counts once, however many rows it has
    samples = batch.take(pa.array(firsts)) if len(firsts) < batch.num_rows else batch
    rewards = samples["reward"].to_numpy()
    lengths = np.add.reduceat(pc.list_value_length(batch["tokens"]).to_numpy(), firsts)
    truncated = pc.equal(samples["finish_reason"], "length").to_numpy()
    _, group_of = np.unique(samples["group"].to_numpy(), return_inverse=True)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": 0.0 if all_equal(rewards) else float(rewards.std()),
        # The samples of the other groups have zero advantage and no gradient.
        "reward/mixed_groups": float(np.mean(~is_constant(rewards, group_of))),
        "completion/tokens_mean": float(lengths.mean()),
        "completion/tokens_max": float(lengths.max()),
        "completion/truncated": float(truncated.mean()),
        "batch/samples": float(samples.num_rows),
        "batch/tokens": float(lengths.sum()),
    }
    components = {f"reward/{name}": value for name, value in component_means(samples["components"]).items()}
    metrics = {**metrics, **components, **metrics}  # a component cannot override these
    return metrics | _episode_metrics(batch) | _token_metrics(batch)


def _episode_metrics(batch: pa.Table) -> dict[str, float]:
    """Returns the number of turns, and the share of tokens that the policy sampled; nothing without an environment.

    For agents, also the number of segments, and the share of sampled tokens that a row repeats from another.
    """
    episodes = batch.filter(pc.is_valid(batch["environment"]))
    if not episodes.num_rows:
        return {}
    lengths_R = pc.list_value_length(episodes["tokens"]).to_numpy()
    rows_M = np.repeat(np.arange(len(lengths_R)), lengths_R)[trained_mask(episodes)]
    kept_R = np.unique(rows_M)  # without those that overlong.mask_truncated leaves out
    trained = episodes.take(pa.array(kept_R))
    firsts = begins_of_samples(episodes)
    turns = _num_turns(episodes, firsts)
    limited = pc.equal(episodes["finish_reason"], "turn_limit").to_numpy()[firsts]
    of_agent: dict[str, float] = {}
    begins, ends = (pc.list_flatten(trained[name]).to_numpy() for name in ("turn_begins", "turn_ends"))
    num_sampled, num_trained = (ends - begins).sum(), trained_mask(trained).sum()
    if _has(episodes, "segment"):
        repeated = 1 - num_trained / max(num_sampled, 1)
        of_agent = {"agent/segments_mean": episodes.num_rows / len(firsts), "agent/repeated_share": float(repeated)}
    return of_agent | {
        "episode/turns_mean": float(turns.mean()),
        "episode/turns_max": float(turns.max()),
        "episode/turn_limit": float(limited.mean()),
        "episode/sampled_share": float(num_trained / max(lengths_R[kept_R].sum(), 1)),
    }


def _num_turns(episodes: pa.Table, firsts: np.ndarray) -> np.ndarray:
    """Returns the number of turns of each episode. A call of an agent counts once, however many rows it is in."""
    if not _has(episodes, "calls"):
        return np.add.reduceat(pc.list_value_length(episodes["turn_begins"]).to_numpy(), firsts)
    episode_R = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=episodes.num_rows))
    episode_of = np.repeat(episode_R, pc.fill_null(pc.list_value_length(episodes["calls"]), 0).to_numpy())
    numbers = pc.struct_field(pc.list_flatten(episodes["calls"]), "number").to_numpy()
    return np.bincount(np.unique(np.stack([episode_of, numbers]), axis=1)[0], minlength=len(firsts))


def _token_metrics(batch: pa.Table) -> dict[str, float]:
    """Returns metrics over the trained tokens, for those of their columns that the batch has.

    `kl/token_mean` and `kl/sample_mean` are the unbiased k1 estimate of KL(policy || reference) in nats, per token and
    per sample; those of `teacher_kl/` are of KL(policy || teacher). `value/explained_variance` is
    1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for one that is no better than a constant; it is
    absent if all returns are equal. `sampling/kept_tokens_mean` is the mean number of tokens that truncated sampling
    has kept.
    """
    mask_N = trained_mask(batch)
    if not mask_N.any():
        return {}
    metrics: dict[str, float] = {}
    if _has(batch, "sampling_mask"):
        lengths = pc.list_value_length(batch["tokens"]).to_pylist()
        rows = zip(batch["sampling_mask"], lengths, strict=True)
        sizes = [decode_sampling_masks(row.as_buffer(), num_tokens)[0] for row, num_tokens in rows]
        metrics["sampling/kept_tokens_mean"] = float(np.concatenate(sizes)[mask_N].mean())
    if _has(batch, "advantages"):
        advantages_M = per_token(batch, "advantages", "metrics")[mask_N]
        statistics = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
        metrics |= {f"advantage/{name}": float(function(advantages_M)) for name, function in statistics.items()}
    for name, other in (("kl", "ref_logprobs"), ("teacher_kl", "teacher_logprobs")):
        if _has(batch, other):
            kl_M = kl_of(batch, "k1", other)
            metrics |= {
                f"{name}/token_mean": float(kl_M.mean()),
                f"{name}/sample_mean": float(kl_M.sum() / max(num_trained_samples(batch), 1)),
            }
    if _has(batch, "values") and _has(batch, "returns"):
        values_M, returns_M = (per_token(batch, name, "metrics")[mask_N] for name in ("values", "returns"))
        metrics["value/mean"] = float(values_M.mean())
        if not all_equal(returns_M, _FLOAT32):
            metrics["value/explained_variance"] = float(1 - (returns_M - values_M).var() / returns_M.var())
    return metrics


def _has(batch: pa.Table, name: str) -> bool:
    return name in batch.column_names and batch[name].null_count < batch.num_rows


def component_means(components: pa.ChunkedArray) -> dict[str, float]:
    """Returns the mean of every reward component over all samples, as for the reward: a sample without it counts 0."""
    values: dict[str, list[float]] = {}
    for row in components.to_pylist():
        for name, value in row:
            values.setdefault(name, []).append(value)
    return {name: math.fsum(numbers) / len(components) for name, numbers in values.items()}
