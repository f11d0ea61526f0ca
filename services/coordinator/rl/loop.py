"""The training loop: generate and score, train, publish. Synchronous and exactly on-policy."""

from services.coordinator.rl.evaluation import evaluate
from services.coordinator.rl.metrics import step_metrics
from services.coordinator.rl.step import LoopContext, collect, update, warm_up
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.run import Run


async def train(run: Run, context: LoopContext, version: int) -> None:
    """Trains from `version`, which the trainer holds, to `run.num_steps` or until the run is stopped."""
    publisher = context.publisher
    with run.phase(Phase.PUBLISHING):
        stamp = await publisher.publish(version)
    await warm_up(run, context, stamp)
    if run.eval_due(version) and not run.record.was_evaluated(version):
        await evaluate(run, context.collector, context.eval_data, stamp)

    while version < run.num_steps and not run.stopping:
        with run.phase(Phase.GENERATING):
            batch = await run.recorded_batch(stamp)
            if batch is None:
                batch = run.record.record_batch(await collect(run, context, stamp, version))
        with run.phase(Phase.TRAINING):
            version, trained = await update(run, context, batch, stamp)
        with run.phase(Phase.PUBLISHING):
            stamp = await publisher.publish(version)
        run.finish_step(version, step_metrics(run, trained, batch))
        if run.checkpoint_due(version):
            with run.phase(Phase.CHECKPOINTING):
                await run.checkpoints.begin(context.trained_models, version)
        if run.eval_due(version):
            await evaluate(run, context.collector, context.eval_data, stamp)
        run.checkpoints.check()
    with run.phase(Phase.CHECKPOINTING):
        await run.end_checkpoints(context.trained_models)
