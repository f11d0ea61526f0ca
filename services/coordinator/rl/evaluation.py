"""Evaluates held-out prompts: mean reward of n samples (avg@n), pass@k, reward components and lengths."""

import hashlib
import json
import math
from collections.abc import Mapping
from itertools import islice

import numpy as np
import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches.blocks import begins_of_samples
from services.common.config.evaluation import EvalSetConfig
from services.common.config.rollout import SamplingConfig
from services.common.rewards import reaches
from services.coordinator.data.groups import rewards_by_column, to_table
from services.coordinator.data.prompts import Prompts
from services.coordinator.rl.metrics import batch_metrics, component_means
from services.coordinator.rl.sampling.collect import Collector
from services.coordinator.runs.checkpoints import versions_of
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.run import Run


async def evaluate(
    run: Run, collector: Collector, eval_data: Mapping[str, Prompts], stamp: PolicyStamp
) -> dict[str, float]:
    """Samples every set, writes the samples as Parquet and returns the metrics, named `eval/<set>/<metric>`.

    Every prompt counts, regardless of `reward.on_failure`: a sample that could not be scored has reward 0, and `failed`
    is the number of such samples, if there are any.
    """
    metrics: dict[str, float] = {}
    scored: dict[str, str] = {}
    digests: dict[str, str] = {}
    with run.phase(Phase.EVALUATING):
        for name, prompts in eval_data.items():
            settings = run.config.evaluation.settings(name)
            sampling = eval_sampling(settings, run.config.rollout.sampling)
            groups = await collector.collect(
                name, [*islice(prompts, settings.max_prompts)], settings.num_samples, sampling, stamp
            )
            samples = to_table(groups)
            is_failed = np.concatenate([group.is_failed for group in groups])
            of_set = set_metrics(samples, settings, is_failed)
            of_set |= rewards_by_column(groups, run.config.data.metrics_column)
            if is_failed.any():
                of_set["failed"] = float(is_failed.sum())
            metrics |= {f"eval/{name}/{metric}": value for metric, value in of_set.items()}
            run.record.keep_evaluation(name, samples, stamp)
            digests[name] = _digest(settings, sampling)
            scored = versions_of(samples) | {"settings": json.dumps(digests)}
    await run.record.ledger.free()
    run.finish_evaluation(stamp.version, metrics, scored)
    return metrics


def _digest(settings: EvalSetConfig, sampling: SamplingConfig) -> str:
    """Returns a digest of what decides about a set's numbers besides its data, the weights and the scorers."""
    numbers = sampling.model_dump_json() + settings.model_dump_json(
        include={"num_samples", "max_prompts", "pass_threshold"}
    )
    return hashlib.sha256(numbers.encode()).hexdigest()[:8]


def eval_sampling(settings: EvalSetConfig, training: SamplingConfig) -> SamplingConfig:
    """Returns how a set is sampled: as in training, apart from what the set says by itself."""
    own = {name: getattr(settings, name) for name in SamplingConfig.model_fields if hasattr(settings, name)}
    return training.model_copy(update=own | {"max_tokens": settings.max_tokens or training.max_tokens})


def set_metrics(samples: pa.Table, settings: EvalSetConfig, is_failed: np.ndarray) -> dict[str, float]:
    """Computes the metrics of one set from its samples (common.batches.batch.SAMPLE_SCHEMA), and which were not scored.

    `reward` is the mean over all samples, `pass@k` the mean of pass_at_k over the prompts, `tokens_mean` the mean
    completion length in tokens, `truncated` the fraction of completions that reached max_tokens. Each reward component
    adds its mean over all samples under its own name. A sample that was not scored does not pass.
    """
    numbers = batch_metrics(samples)
    samples = samples.take(pa.array(begins_of_samples(samples)))  # each counts once, however many rows it has
    metrics = {"reward": numbers["reward/mean"]}
    _, prompt_of = np.unique(samples["group"].to_numpy(), return_inverse=True)
    num_samples = np.bincount(prompt_of)
    is_passed = ~is_failed & reaches(samples["reward"].to_numpy(), settings.pass_threshold)
    num_passed = np.bincount(prompt_of, is_passed)
    for k in settings.pass_k:
        chances = [pass_at_k(n, int(c), k) for n, c in zip(num_samples.tolist(), num_passed, strict=True)]
        metrics[f"pass@{k}"] = float(np.mean(chances))
    metrics |= {name: numbers[f"completion/{name}"] for name in ("tokens_mean", "truncated")}
    return {**metrics, **component_means(samples["components"]), **metrics}  # a component cannot override these


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimates, without bias, the probability that one of `k` samples passes, if c of n passed (arXiv 2107.03374)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
