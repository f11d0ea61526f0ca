"""Numbers of a step, from its batch alone, so that any recorded step gives the same ones again."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def batch_metrics(batch: pa.Table) -> dict[str, float]:
    """Rewards and lengths of a batch (common.batch.SAMPLE_SCHEMA)."""
    rewards = batch["reward"].to_numpy()
    lengths = pc.list_value_length(batch["tokens"]).to_numpy()
    finished = np.array([reason == "stop" for reason in batch["finish_reason"].to_pylist()])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/mixed_groups": _share_of_mixed_groups(batch["group"].to_numpy(), rewards),
        "completion/tokens_mean": float(lengths.mean()),
        "completion/tokens_max": float(lengths.max()),
        "completion/truncated": float(1 - finished.mean()),
        "batch/samples": float(batch.num_rows),
        "batch/tokens": float(lengths.sum()),
    }
    return metrics | {f"reward/{name}": value for name, value in component_means(batch["components"]).items()}


def component_means(components: pa.ChunkedArray) -> dict[str, float]:
    """Mean of every reward component over the samples that have it."""
    values: dict[str, list[float]] = {}
    for row in components.to_pylist():
        for name, value in row:
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def _share_of_mixed_groups(groups: np.ndarray, rewards: np.ndarray) -> float:
    """Share of prompt groups whose samples differ in reward: the others teach nothing."""
    parts = [rewards[groups == group] for group in np.unique(groups)]
    return float(np.mean([part.min() < part.max() for part in parts]))
