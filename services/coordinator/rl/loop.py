"""The training loop: generate and score, train, publish. Synchronous and exactly on-policy."""

from services.coordinator.rl.evaluation import evaluate
from services.coordinator.rl.step import Parts, collect, update, warm_up
from services.coordinator.runs.run import Phase, Run


async def train(run: Run, parts: Parts, version: int) -> None:
    """Trains from the `version` that the trainer holds to `run.num_steps`, or until a stop is asked for."""
    publisher = parts.publisher
    with run.phase(Phase.PUBLISHING):
        stamp = await publisher.publish(version)
    await warm_up(run, parts, stamp)
    if run.eval_due(version) and not run.evaluated(version):
        await evaluate(run, parts.collector, parts.eval_data, stamp)

    while version < run.num_steps and not run.stopping:
        with run.phase(Phase.GENERATING):
            batch = await run.recorded_batch(stamp) or await collect(run, parts, stamp)
        with run.phase(Phase.TRAINING):
            version, metrics = await update(run, parts, batch, stamp)
        with run.phase(Phase.PUBLISHING):
            stamp = await publisher.publish(version)
        run.finish_step(version, metrics, batch)
        if run.checkpoint_due(version):
            with run.phase(Phase.CHECKPOINTING):
                await run.begin_checkpoint(parts.trained, version)
        if run.eval_due(version):
            await evaluate(run, parts.collector, parts.eval_data, stamp)
        run.check_checkpoint()
    with run.phase(Phase.CHECKPOINTING):
        await run.end_checkpoints(parts.trained)
