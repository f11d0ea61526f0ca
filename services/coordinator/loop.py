"""The training loop: generate and score, train, publish. Synchronous and exactly on-policy."""

from dataclasses import dataclass

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.coordinator.advantages import credit
from services.coordinator.clients.trainer import Trainer
from services.coordinator.collect import Collector
from services.coordinator.data.prompts import PromptDataset, Prompts
from services.coordinator.evaluation import evaluate
from services.coordinator.groups import to_table
from services.coordinator.publication import Publisher
from services.coordinator.run import Phase, Run


@dataclass(frozen=True)
class Parts:
    """What the loop works with."""

    data: PromptDataset
    eval_data: dict[str, Prompts]
    collector: Collector
    trainer: Trainer
    publisher: Publisher


async def train(run: Run, parts: Parts, version: int) -> None:
    """Trains from the `version` that the trainer holds to `run.num_steps`, or until a stop is asked for."""
    trainer, publisher = parts.trainer, parts.publisher
    with run.phase(Phase.PUBLISHING):
        stamp = await publisher.publish(version)
    if run.eval_due(version) and not run.evaluated(version):
        await evaluate(run, parts.collector, parts.eval_data, stamp)

    while version < run.num_steps and not run.stopping:
        with run.phase(Phase.GENERATING):
            batch = await run.recorded_batch(stamp) or await collect(run, parts, stamp)
        with run.phase(Phase.TRAINING):
            version, metrics = await trainer.train(batch, run.batch_id(stamp), stamp)
        with run.phase(Phase.PUBLISHING):
            stamp = await publisher.publish(version)
        run.finish_step(version, metrics, batch)
        if run.checkpoint_due(version):
            with run.phase(Phase.CHECKPOINTING):
                await run.begin_checkpoint(trainer, version)
        if run.eval_due(version):
            await evaluate(run, parts.collector, parts.eval_data, stamp)
        run.check_checkpoint()
    with run.phase(Phase.CHECKPOINTING):
        await run.finish_checkpoint()


async def collect(run: Run, parts: Parts, stamp: PolicyStamp) -> pa.Table:
    """The step's batch: sampled from `stamp`, scored, credited, and kept before it is trained on."""
    config = run.config
    prompts, rollout = parts.data.batch(stamp.version), config.rollout
    groups = await parts.collector.collect(prompts, rollout.completions_per_prompt, rollout.sampling, stamp)
    batch = to_table(groups)
    if config.trainer.loss.kl_coef:
        batch = await parts.trainer.add_reference(batch)
    return run.record_batch(credit(batch, config.advantage), stamp, parts.data.digest)
