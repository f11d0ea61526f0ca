"""Runs the training loop with a lag of k versions: each batch is sampled while the trainer works on earlier batches.

The batch that updates version t is sampled from exactly version t - k, and the first k from the version that the run
begins with. The replicas hold one stamp at a time: a version is published only after the batch that is sampled from the
version before is complete and on disk. So nothing is in progress between two steps, and a checkpoint of version t needs
only the batches that update t to t + k - 1, which are on disk.
"""

from collections import deque
from dataclasses import dataclass

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import DataLoss
from services.common.tasks import task_group
from services.coordinator.rl.loop import save_and_evaluate
from services.coordinator.rl.metrics import step_metrics
from services.coordinator.rl.step import LoopContext, collect
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.run import Run


@dataclass(frozen=True)
class DrawnBatch:
    """Holds a batch and the stamp that its samples were generated from."""

    samples: pa.Table
    stamp: PolicyStamp


async def train_lagged(run: Run, context: LoopContext) -> None:
    """Trains from `run.version`, which is that of a checkpoint, to `run.num_steps` or until the run is stopped."""
    publisher, version, lag = context.publisher, run.version, run.config.trainer.lag.versions
    with run.phase(Phase.PUBLISHING):
        stamp = await publisher.publish(version)
    await save_and_evaluate(run, context, stamp)
    batches = deque([await draw(run, context, stamp, number) for number in range(version, version + lag)])

    while version < run.num_steps and not run.stopping:
        async with task_group() as tasks:
            drawing = tasks.create_task(draw(run, context, stamp, version + lag))
            batch = batches.popleft()
            assert batch is not None, "it updates a version below num_steps"
            version, trained = await update(run, context, batch, stamp)
        batches.append(drawing.result())
        with run.phase(Phase.PUBLISHING):
            stamp = await publisher.publish(version)
        run.finish_step(version, metrics_of(run, trained, batch))
        await save_and_evaluate(run, context, stamp)
        run.checkpoints.check()
    with run.phase(Phase.CHECKPOINTING):
        await run.end_checkpoints(context.trained_models)


async def draw(run: Run, context: LoopContext, stamp: PolicyStamp, version: int) -> DrawnBatch | None:
    """Returns the batch that updates `version`, sampled from `stamp`; None if the run ends before it.

    A batch that was sampled before a restart is read from disk. It cannot be sampled again if its weights are older
    than `stamp`.

    Raises:
        DataLoss: A batch of older weights is missing or damaged.
    """
    if version >= run.num_steps:
        return None
    recorded = run.record.recorded_stamp(version)
    is_older = recorded.digest != "" and recorded.version < stamp.version
    samples = run.record.recorded_batch(version, recorded if is_older else stamp)
    if samples is not None:
        return DrawnBatch(samples, recorded if is_older else stamp)
    if is_older:
        raise DataLoss(
            f"the batch of step {version + 1} in {run.config.run_dir} was sampled from version {recorded.version} and "
            "is missing or damaged: restore the file, or resume from an earlier checkpoint"
        )
    with run.phase(Phase.GENERATING):
        return DrawnBatch(run.record.record_batch(await collect(run, context, stamp, version)), stamp)


async def update(run: Run, context: LoopContext, batch: DrawnBatch, stamp: PolicyStamp) -> tuple[int, dict[str, float]]:
    """Updates the policy, which holds `stamp`. Returns the new version and the metrics of the update."""
    with run.phase(Phase.TRAINING):
        await run.checkpoints.finish()  # the weights must not change before
        return await context.trainer.train(batch.samples, run.batch_id(stamp), stamp, drawn=batch.stamp)


def metrics_of(run: Run, trained: dict[str, float], batch: DrawnBatch) -> dict[str, float]:
    """Returns all metrics of the step, with its lag in versions and its effective sample size (share of the tokens).

    `time/generating_s` is that of another step's batch; 0 if none was generated.
    """
    lag = {"lag/versions": float(run.version - batch.stamp.version), "lag/ess": trained["logprob_gap_ess"]}
    return {"time/generating_s": 0.0, **step_metrics(run, trained, batch.samples), **lag}
