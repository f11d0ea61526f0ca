"""The words of the loop: begin, sample a batch, commit it to the models that are trained, save and evaluate.

Each knows how to go on after a crash: a batch that is on disk is not sampled again, and one that the trainer has
applied is answered from its memory. `sample` sends the blocks of a batch to the trainer while other groups are still
being generated, if the config streams. The trainer applies nothing before the commit, which is sent once the batch is
on disk. A stream that is lost costs only time: the batch is then sent again, which gives the same weights.
"""

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import begins_of_groups
from services.common.config.run import Config
from services.common.config.streaming import streams
from services.common.errors import DataLoss, LockstepError, PreconditionFailed, Reason
from services.common.families.registry import ENGINE_DIFFERENCES
from services.common.files import parse_object
from services.common.json_values import JsonObject
from services.common.tasks import task_group
from services.coordinator.clients.trainer import BlockStream, Model, Trainer
from services.coordinator.data.groups import ScoredGroup, answers_of, rewards_by_column, to_episodes, to_table
from services.coordinator.data.prompts import PromptDataset, Prompts, prompts_to_try
from services.coordinator.rl.advantages import compute_advantages
from services.coordinator.rl.advantages.samples import coef_after, kl_record
from services.coordinator.rl.blocks import BlockMaker
from services.coordinator.rl.evaluation import evaluate
from services.coordinator.rl.metrics import step_metrics
from services.coordinator.rl.publishing import Publisher
from services.coordinator.rl.sampling.collect import Collector, PromptRequest
from services.coordinator.rl.sampling.selection import select
from services.coordinator.runs.checkpoints import Versions, change_since
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.record import CollectedBatch
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)

# Errors that are not the batch's fault: the connection, the deadline, or another call that needed the trainer.
_LOST = {Reason.UNREACHABLE, Reason.DEADLINE, Reason.STREAM_ENDED}
# The new version and the metrics of an update.
Updated = tuple[int, dict[str, float]]


@dataclass(frozen=True)
class LoopContext:
    data: PromptDataset
    eval_data: dict[str, Prompts]
    collector: Collector
    trainer: Trainer
    publisher: Publisher
    block_maker: BlockMaker
    versions: Versions
    """Those of the scorers and the environment that the run has opened."""
    critic: Model | None = None

    @property
    def trained_models(self) -> Sequence[Model]:
        # The policy is the last: its newest checkpoint needs the critic's of the same step.
        return (self.critic, self.trainer) if self.critic else (self.trainer,)


@dataclass(frozen=True)
class Batch:
    """A batch that is on disk, the stamp that it was sampled from, and the stream that its blocks were sent on."""

    samples: pa.Table
    stamp: PolicyStamp
    stream: "BatchStream | None" = None


async def begin(run: Run, context: LoopContext) -> PolicyStamp:
    """Publishes the version that the run starts from, warms up the critic, and returns the version's stamp.

    If the trainer is a step ahead, the coordinator ended before it recorded that step. The stamp is then that of the
    recorded batch, and nothing is published: `commit` gets the trainer's answer from memory, and the step is finished
    like any other.
    """
    run.adopt_checkpoint(context.trainer.opened.version)
    if run.version < context.trainer.opened.version:
        return run.unfinished_stamp()
    with run.phase(Phase.PUBLISHING):
        stamp = await context.publisher.publish(run.version)
    await _warm_up(run, context, stamp)
    await save_and_evaluate(run, context, stamp)
    return stamp


def goes_on(run: Run, context: LoopContext) -> bool:
    """Returns whether there is another step. A stopped run still finishes the one that the trainer has applied."""
    is_ahead = run.version < context.trainer.opened.version  # of the record: the coordinator ended in between
    return is_ahead or (run.version < run.num_steps and not run.stopping)


async def sample(run: Run, context: LoopContext, stamp: PolicyStamp, version: int, tasks: asyncio.TaskGroup) -> Batch:
    """Returns the batch that updates `version`, sampled from `stamp`; an empty one if the run ends before it.

    A batch that was sampled before a restart is read from disk, unless it was scored by other scorers or another
    environment. With a lag, it cannot be sampled again if its weights are older than `stamp`. The stream of its blocks
    runs as a task in `tasks`.

    Raises:
        DataLoss: A batch of older weights is missing or damaged.
    """
    # A step that the trainer has applied is finished, even if the run has fewer steps by now.
    if version >= max(run.num_steps, context.trainer.opened.version):
        return Batch(pa.table({}), stamp)
    recorded, lag = run.record.recorded_stamp(version), run.config.trainer.lag.versions
    is_older = lag > 0 and recorded.digest != "" and recorded.version < stamp.version
    sampled_from = recorded if is_older else stamp
    samples = run.record.recorded_batch(version, sampled_from)
    # An applied batch is sent again as it was, whatever has changed: the trainer refuses other samples under its id.
    is_applied = version < context.trainer.opened.version
    if samples is not None and not (is_older or is_applied) and (change := change_since(samples, context.versions)):
        log.warning("the recorded batch of step %d is sampled and scored again, because %s", version + 1, change)
        samples, run.record.batch_is_from_disk = None, False
    if samples is not None:
        await run.checkpoints.finish()  # the weights must not change before, and the update comes at once
        return Batch(samples, sampled_from)
    if is_older:
        raise DataLoss(
            f"the batch of step {version + 1} in {run.config.run_dir} was sampled from version {recorded.version} and "
            "is missing or damaged: restore the file, or resume from an earlier checkpoint"
        )
    with run.phase(Phase.GENERATING):
        stream = BatchStream(run, context, stamp, tasks) if streams(run.config) else None
        collected = await collect(run, context, stamp, version, stream)
        return Batch(run.record.record_batch(collected), stamp, stream)


async def commit(run: Run, context: LoopContext, batch: Batch, stamp: PolicyStamp) -> Updated:
    """Applies `batch` to the models, which hold `stamp`. Returns the new version and the metrics."""
    try:
        with run.phase(Phase.TRAINING):
            updated = await batch.stream.commit(batch.samples) if batch.stream else None
            version, metrics = updated or await update(run, context, batch, stamp)
    except PreconditionFailed as error:
        if error.reason is not Reason.LOGPROB_DIFF or not (cause := _known_difference(context)):
            raise
        message = f"{error.message}. Likely cause: {cause}"
        raise PreconditionFailed(message, reason=error.reason, **error.metadata) from error
    largest = metrics.get("logprob_diff_max") if stamp.version == 0 else None
    if largest and (cause := _known_difference(context)):
        log.warning("engine and trainer differ by up to %.2g nats in the first batch: %s", largest, cause)
    return version, metrics


def _known_difference(context: LoopContext) -> str:
    """Returns why the engine is known to compute this type of model otherwise than the trainer; "" if it is not."""
    files = context.trainer.opened.model_card.files
    content = parse_object(files["config.json"], Path("config.json"))
    # The own type of a model that also sees says nothing of its text part.
    parts = content, cast(JsonObject, content.get("text_config") or {})
    causes = (ENGINE_DIFFERENCES.get(str(part.get("model_type"))) for part in parts)
    return next(filter(None, causes), "")


async def update(run: Run, context: LoopContext, batch: Batch, stamp: PolicyStamp) -> Updated:
    if context.critic or run.config.trainer.lag.versions:  # a save in progress writes weights that must not change
        await run.checkpoints.finish()
    batch_id, samples = run.batch_id(stamp.version), batch.samples
    async with task_group() as tasks:
        critic = None
        if context.critic and run.config.critic:
            # The critic's version also counts the batches of its warm-up.
            critic_version = stamp.version + run.config.critic.warmup_steps
            critic = tasks.create_task(context.critic.train(samples, batch_id, stamp, critic_version))
        # Named only if it is an earlier one (trainer.lag). Otherwise the trainer requires the stamp that it holds.
        sampled_from = batch.stamp if batch.stamp != stamp else None
        version, metrics = await context.trainer.train(samples, batch_id, stamp, drawn=sampled_from)
    return version, metrics | (critic.result()[1] if critic else {})


async def save_and_evaluate(run: Run, context: LoopContext, stamp: PolicyStamp) -> None:
    """Saves and evaluates the policy of `stamp`, if this is due and not recorded yet."""
    if run.checkpoint_due(stamp.version):
        with run.phase(Phase.CHECKPOINTING):
            await run.checkpoints.begin(context.trained_models, stamp.version)
    if run.eval_due(stamp.version) and not run.record.was_evaluated(stamp.version):
        await evaluate(run, context.collector, context.eval_data, stamp)


def metrics_of(run: Run, trained: dict[str, float], batch: Batch) -> dict[str, float]:
    """Returns all metrics of the step; with a lag, also the lag in versions and the effective sample size.

    `time/generating_s` is 0 if nothing was generated; with a lag, it is that of another step's batch.
    """
    lag: dict[str, float] = {}
    if run.config.trainer.lag.versions:
        lag = {"lag/versions": float(run.version - batch.stamp.version), "lag/ess": trained["logprob_diff_ess"]}
    return {"time/generating_s": 0.0, **step_metrics(run, trained, batch.samples), **lag}


class BatchStream:
    """Sends the blocks of one batch to the trainer. Unless it is lost on the way, its failure fails the step at once.

    Without `commit`, nothing is applied.
    """

    def __init__(self, run: Run, context: LoopContext, stamp: PolicyStamp, tasks: asyncio.TaskGroup):
        self._run, self._context, self._stamp, self._tasks = run, context, stamp, tasks
        self._call: tuple[BlockStream, asyncio.Task[Updated | None]] | None = None
        self._groups: list[int] = []
        self._blocks: list[pa.Table] = []

    def send(self, groups: Sequence[ScoredGroup]) -> None:
        config = self._run.config
        if self._call is None:
            stream = self._context.trainer.stream(self._run.batch_id(self._stamp.version), self._stamp)
            self._call = stream, self._tasks.create_task(_unless_lost(stream))
        self._blocks.append(samples_of(config, groups, kl_coef(self._run, self._stamp.version)))
        self._call[0].send(self._blocks[-1])
        self._groups += [group.index for group in groups]

    def batch_of(self, groups: Sequence[ScoredGroup]) -> pa.Table | None:
        """Returns the samples of `groups` with their advantages, as they were sent; None if other groups were sent."""
        return pa.concat_tables(self._blocks) if [group.index for group in groups] == self._groups else None

    async def commit(self, batch: pa.Table) -> Updated | None:
        """Applies the blocks of `batch`, which is on disk. Returns the new version and metrics.

        Returns None if no block was sent, the stream was lost, or `batch` has another order or fewer groups for its
        mini-batches than what was sent: it must be sent again.
        """
        if self._call is None:
            return None
        stream, answer = self._call
        groups, config = batch["group"].to_numpy()[begins_of_groups(batch)].tolist(), self._run.config
        is_short = config.trainer.num_minibatches > 1 and len(groups) != config.data.prompts_per_step
        # A group that was sampled again, because its replica was lost, is shorter than the part that was reported.
        if groups != self._groups or is_short:
            log.warning("the batch has another order or smaller mini-batches than its blocks; it is sent again")
            answer.cancel()
            return None
        # The commit has the hash of the batch as it was recorded: if blocks had other values, nothing is applied.
        stream.commit(batch)
        return await answer


async def _unless_lost(stream: BlockStream) -> Updated | None:
    try:
        return await stream.run()
    except LockstepError as error:
        if error.reason not in _LOST:
            raise
        log.warning("the stream of blocks was lost; the batch is sent again: %s", error.message)
        return None


async def _warm_up(run: Run, context: LoopContext, stamp: PolicyStamp) -> None:
    """Trains only the critic on `critic.warmup_steps` batches of the initial policy. The batches are not recorded."""
    if not context.critic or not run.config.critic or stamp.version > 0:
        return
    num_batches = run.config.critic.warmup_steps
    with run.phase(Phase.TRAINING):
        for index in range(context.critic.opened.version, num_batches):
            if run.stopping:
                log.warning("the critic's warm-up, stopped after %d of %d batches, begins again", index, num_batches)
                return
            batch = await collect(run, context, stamp, -1 - index)
            _, metrics = await context.critic.train(batch.samples, f"{run.run_id}/warm-up/{index}", stamp, index)
            log.info("batch %d of %d of the critic's warm-up: %s", index + 1, num_batches, metrics)


async def collect(
    run: Run, context: LoopContext, stamp: PolicyStamp, step: int, stream: BatchStream | None = None
) -> CollectedBatch:
    """Samples the batch of `step` from `stamp`: scores and selects groups, runs other models, computes advantages.

    Batch i of a critic's warm-up is step -1 - i, which has the prompts of step i with seeds of its own. `stream` sends
    its groups in blocks, each as soon as it is complete.
    """
    config, rollout = run.config, run.config.rollout
    request = PromptRequest(rollout.completions_per_prompt, rollout.sampling, stamp, step)
    is_warm_up = step < 0  # it reads what is known at the policy's version
    version, with_prompts_of = (stamp.version, -1 - step) if is_warm_up else (step, step)
    prompts = prompts_to_try(
        context.data, config, with_prompts_of, lambda _, window: run.record.ledger.success_rates(version, window)
    )
    collector, name = context.collector, "warm-up of the critic" if is_warm_up else f"step {step + 1}"
    with collector.failure_log.counting(name, is_evaluation=False):
        async with context.block_maker.begin(stream.send if stream else None) as blocks:
            collect_one = collector.with_baseline if config.advantage.needs_baseline else collector.one
            draw_one = functools.partial(collect_one, request=request)
            selected = await select(config, prompts, draw_one, blocks, lambda: str(collector.failure_log.last))
            groups = await blocks.complete(context.block_maker.in_order(selected.groups))
    coef = kl_coef(run, version)
    samples = stream.batch_of(groups) if stream else None
    samples = samples_of(config, groups, coef) if samples is None else samples
    kl = kl_record(samples, coef, config.advantage.kl) if config.advantage.needs_reference else None
    metrics = selected.metrics | collector.take_metrics()
    # The batch is recorded next, and to wait for another process's lock there would block the event loop.
    await run.record.ledger.free()
    decision = {**selected.decision, "metrics": metrics | rewards_by_column(groups, config.data.metrics_column)}
    data, of_agents, answers = context.data, to_episodes(groups), answers_of(groups)
    return CollectedBatch(
        samples, version, stamp, decision, selected.outcomes, data.digest, len(data), kl, of_agents, answers
    )


def samples_of(config: Config, groups: Sequence[ScoredGroup], coef: float) -> pa.Table:
    """Returns the samples of `groups` with their advantages; `coef` is that of the KL penalty in the reward.

    A streamed step calls this for each block: there, no group's advantages depend on another group.
    """
    samples = to_table(groups, mask_truncated=config.selection.overlong.mask_truncated)
    return compute_advantages(samples, config.advantage, kl_coef=coef)


def kl_coef(run: Run, version: int) -> float:
    """Returns the coefficient of the KL penalty in the reward of the batch that updates `version`."""
    before = run.record.ledger.last(Kind.COLLECTED, version - 1) or {}
    return coef_after(before.get("kl"), run.config.advantage.kl)
