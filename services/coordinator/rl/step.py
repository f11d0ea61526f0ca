"""Implements the parts of a step: samples a batch, computes its advantages and updates the models."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches.blocks import blocks_of
from services.common.config.run import Config
from services.common.config.streaming import block_cutter
from services.common.tasks import task_group
from services.coordinator.clients.trainer import Model, Trainer
from services.coordinator.data.groups import rewards_by_column, to_table
from services.coordinator.data.prompts import PromptDataset, Prompts, prompts_to_try
from services.coordinator.rl.advantages import compute_advantages
from services.coordinator.rl.advantages.samples import coef_after, kl_record
from services.coordinator.rl.forwards import Forwards, TakeBlock
from services.coordinator.rl.publishing.publication import Publisher
from services.coordinator.rl.sampling.collect import Collector, Draw
from services.coordinator.rl.sampling.selection import select
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.record import CollectedBatch
from services.coordinator.runs.run import Run


@dataclass(frozen=True)
class LoopContext:
    """Holds the data and clients that the training loop uses."""

    data: PromptDataset
    eval_data: dict[str, Prompts]
    collector: Collector
    trainer: Trainer
    publisher: Publisher
    forwards: Forwards
    critic: Model | None = None

    @property
    def trained_models(self) -> Sequence[Model]:
        """Models that are trained and saved; the policy is the last."""
        return (self.critic, self.trainer) if self.critic else (self.trainer,)


async def warm_up(run: Run, context: LoopContext, stamp: PolicyStamp) -> None:
    """Trains only the critic on `critic.warmup_steps` batches of the initial policy. The batches are not recorded."""
    if not context.critic or not run.config.critic or stamp.version > 0:
        return
    with run.phase(Phase.TRAINING):
        for index in range(context.critic.opened.version, run.config.critic.warmup_steps):
            if run.stopping:
                return
            batch = await collect(run, context, stamp, run.num_steps + index)
            await context.critic.train(batch.samples, f"{run.run_id}/warm-up/{index}", stamp, index)


async def update(run: Run, context: LoopContext, batch: pa.Table, stamp: PolicyStamp) -> tuple[int, dict[str, float]]:
    """Updates the policy and, if there is one, the critic. Returns the new version and the metrics of both."""
    batch_id = run.batch_id(stamp)
    if context.critic:  # the save in progress writes the critic, then the policy, which must not change before that
        await run.checkpoints.finish()
    async with task_group() as tasks:
        critic = None
        if context.critic and run.config.critic:
            critic_version = stamp.version + run.config.critic.warmup_steps
            critic = tasks.create_task(context.critic.train(batch, batch_id, stamp, critic_version))
        version, metrics = await context.trainer.train(batch, batch_id, stamp)
    return version, metrics | (critic.result()[1] if critic else {})


async def collect(
    run: Run, context: LoopContext, stamp: PolicyStamp, step: int, take: TakeBlock | None = None
) -> CollectedBatch:
    """Samples the batch of `step` from `stamp`: scores and selects groups, runs other models, computes advantages.

    `take` gets its groups in blocks, each as soon as it is complete.
    """
    config, rollout = run.config, run.config.rollout
    draw = Draw(rollout.completions_per_prompt, rollout.sampling, stamp, step)
    # A critic's warm-up has step numbers beyond the run's; it reads what is known at the policy's version.
    version = step if step < run.num_steps else stamp.version
    prompts = prompts_to_try(
        context.data, config, step, lambda _, window: run.record.ledger.success_rates(version, window)
    )
    collector, what = context.collector, f"step {step + 1}" if step < run.num_steps else "warm-up of the critic"
    with collector.failure_log.counting(what, is_evaluation=False):
        async with context.forwards.of_batch(take) as forwards:
            collect_one = collector.with_baseline if config.advantage.needs_baseline else collector.one
            draw_one = functools.partial(collect_one, draw=draw)
            selected = await select(config, prompts, draw_one, forwards, collector.why_no_score)
            groups = await forwards.complete(context.forwards.in_order(selected.groups))
    coef = kl_coef(run, version)
    samples = to_table(groups, mask_truncated=config.selection.overlong.mask_truncated)
    samples = with_advantages(config, samples, coef)
    kl = kl_record(samples, coef, config.advantage.kl) if config.advantage.needs_reference else None
    metrics = selected.metrics | collector.take_metrics()
    await run.record.ledger.free()  # the batch is recorded next
    decision = {**selected.decision, "metrics": metrics | rewards_by_column(groups, config.data.metrics_column)}
    return CollectedBatch(
        samples, version, stamp, decision, selected.outcomes, context.data.digest, len(context.data), kl
    )


def with_advantages(config: Config, samples: pa.Table, coef: float) -> pa.Table:
    """Returns `samples` with their advantages; `coef` is that of the KL penalty in the reward.

    Computes each block by itself, as a streamed step must, so that the numbers are the same to the last bit.
    """
    cutter = block_cutter(config)
    blocks = blocks_of(samples, cutter) if cutter else [samples]
    return pa.concat_tables(compute_advantages(block, config.advantage, kl_coef=coef) for block in blocks)


def kl_coef(run: Run, version: int) -> float:
    """Returns the coefficient of the KL penalty in the reward of the batch that updates `version`."""
    before = run.record.ledger.last(Kind.COLLECTED, version - 1) or {}
    return coef_after(before.get("kl"), run.config.advantage.kl)
