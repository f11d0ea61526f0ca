"""Runs the training loop: sample, commit, publish.

Without a lag it is synchronous and exactly on-policy: each batch is sampled from the weights that it updates.

With a lag of k versions, each batch is sampled while the trainer works on earlier ones: the batch that updates version
t is sampled from exactly version t - k, and the first k from the version that the run begins with. The replicas hold
one stamp at a time: a version is published only after the batch that is sampled from the version before is complete and
on disk. So nothing is in progress between two steps, and a checkpoint of version t needs only the batches that update t
to t + k - 1, which are on disk.
"""

import asyncio
from collections import deque

from services.common.tasks import task_group
from services.coordinator.rl.step import (
    Batch,
    LoopContext,
    begin,
    commit,
    goes_on,
    metrics_of,
    sample,
    save_and_evaluate,
)
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.run import Run


async def train(run: Run, context: LoopContext) -> None:
    """Trains from `run.version` to `run.num_steps` or until the run is stopped."""
    stamp, lag = await begin(run, context), run.config.trainer.lag.versions
    sampled: deque[asyncio.Task[Batch]] = deque()  # the batches of the next `lag` steps
    async with task_group() as tasks:
        # One after the other: failures and the lengths of unfinished groups are counted for one batch at a time.
        for version in range(run.version, run.version + lag):
            sampled.append(tasks.create_task(sample(run, context, stamp, version, tasks)))
            await sampled[-1]

    while goes_on(run, context):
        async with task_group() as tasks:
            sampling = sample(run, context, stamp, run.version + lag, tasks)
            sampled.append(tasks.create_task(sampling))
            batch = await sampled.popleft()
            version, trained = await commit(run, context, batch, stamp)
        # By now all samples are on disk: a publication would abort unfinished ones.
        with run.phase(Phase.PUBLISHING):
            stamp = await context.publisher.publish(version)
        run.finish_step(version, metrics_of(run, trained, batch))
        await save_and_evaluate(run, context, stamp)
        # A save that has failed in the background ends the run now, and not when the next checkpoint is due.
        run.checkpoints.check()
    with run.phase(Phase.CHECKPOINTING):
        await run.end_checkpoints(context.trained_models)
