"""Runs the training loop: generate and score, train, publish. It is synchronous and exactly on-policy."""

from lockstep.types.v1.types_pb2 import PolicyStamp

from services.coordinator.rl.evaluation import evaluate
from services.coordinator.rl.metrics import step_metrics
from services.coordinator.rl.step import LoopContext, collect, update, warm_up
from services.coordinator.rl.streaming import sending_blocks
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.run import Run


async def train(run: Run, context: LoopContext) -> None:
    """Trains from `run.version` to `run.num_steps` or until the run is stopped.

    If the trainer is a step ahead, the coordinator ended before it recorded that step. The trainer then answers the
    recorded batch from memory, and the step is finished like any other.
    """
    publisher, version, held = context.publisher, run.version, context.trainer.opened.version
    run.adopt_checkpoint(held)
    if version < held:
        stamp = run.unfinished_stamp()
    else:
        with run.phase(Phase.PUBLISHING):
            stamp = await publisher.publish(version)
        await warm_up(run, context, stamp)
        await save_and_evaluate(run, context, stamp)

    while version < held or (version < run.num_steps and not run.stopping):
        async with sending_blocks(run, context, stamp) as blocks:
            with run.phase(Phase.GENERATING):
                batch = await run.recorded_batch(stamp) or run.record.record_batch(
                    await collect(run, context, stamp, version, blocks.take)
                )
            with run.phase(Phase.TRAINING):
                version, trained = await blocks.commit(batch) or await update(run, context, batch, stamp)
        with run.phase(Phase.PUBLISHING):
            stamp = await publisher.publish(version)
        run.finish_step(version, step_metrics(run, trained, batch))
        await save_and_evaluate(run, context, stamp)
        run.checkpoints.check()
    with run.phase(Phase.CHECKPOINTING):
        await run.end_checkpoints(context.trained_models)


async def save_and_evaluate(run: Run, context: LoopContext, stamp: PolicyStamp) -> None:
    """Saves and evaluates the policy of `stamp`, if this is due and not recorded yet."""
    if run.checkpoint_due(stamp.version):
        with run.phase(Phase.CHECKPOINTING):
            await run.checkpoints.begin(context.trained_models, stamp.version)
    if run.eval_due(stamp.version) and not run.record.was_evaluated(stamp.version):
        await evaluate(run, context.collector, context.eval_data, stamp)
