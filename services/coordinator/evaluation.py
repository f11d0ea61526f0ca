"""Greedy reward on held-out prompts."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.coordinator.advantages import dr_grpo
from services.coordinator.collect import Collector
from services.coordinator.data.prompts import Prompts
from services.coordinator.groups import to_table
from services.coordinator.metrics import component_means
from services.coordinator.run import Phase, Run


async def evaluate(run: Run, collector: Collector, eval_data: Mapping[str, Prompts], stamp: PolicyStamp) -> None:
    """One greedy completion of every held-out prompt; mean reward and components by set, samples kept as Parquet."""
    settings = run.config.evaluation
    sampling = run.config.rollout.sampling.model_copy(
        update={"temperature": 0.0, "max_tokens": settings.max_tokens or run.config.rollout.sampling.max_tokens}
    )
    metrics: dict[str, float] = {}
    with run.phase(Phase.EVALUATING):
        for name, prompts in eval_data.items():
            table = to_table(await collector.collect(prompts, 1, sampling, stamp), dr_grpo)
            metrics |= _summary(name, table)
            run.keep_evaluation(name, table, stamp)
    run.finish_evaluation(stamp.version, metrics)


def _summary(name: str, table: pa.Table) -> dict[str, float]:
    means = component_means(table["components"])
    reward = float(np.mean(table["reward"].to_numpy()))
    return {f"eval/{name}/reward": reward} | {f"eval/{name}/{scorer}": value for scorer, value in means.items()}
