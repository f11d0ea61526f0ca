"""What the loop does in a step: sample, credit, update."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.tasks import gather
from services.coordinator.data.curriculum import prompts_to_try
from services.coordinator.data.groups import to_table
from services.coordinator.data.prompts import PromptDataset, Prompts
from services.coordinator.rl.advantages import credit
from services.coordinator.rl.collect import Collector, Draw
from services.coordinator.rl.forwards import Forwards
from services.coordinator.rl.publication import Publisher
from services.coordinator.rl.selection import Selected, select
from services.coordinator.runs.run import Phase, Run
from services.coordinator.services.clients.trainer import Model, Trainer


@dataclass(frozen=True)
class Parts:
    """What the loop works with."""

    data: PromptDataset
    eval_data: dict[str, Prompts]
    collector: Collector
    trainer: Trainer
    publisher: Publisher
    forwards: Forwards
    critic: Model | None = None

    @property
    def trained(self) -> Sequence[Model]:
        """The models that checkpoints hold, the policy last."""
        return (self.critic, self.trainer) if self.critic else (self.trainer,)


async def warm_up(run: Run, parts: Parts, stamp: PolicyStamp) -> None:
    """Trains the critic alone on `critic.warmup_steps` batches of the first policy, which are not kept."""
    if not parts.critic or not run.config.critic or stamp.version > 0:
        return
    with run.phase(Phase.TRAINING):
        for index in range(parts.critic.opened.version, run.config.critic.warmup_steps):
            if run.stopping:
                return
            batch, _ = await sample(run, parts, stamp, run.num_steps + index)
            await parts.critic.train(batch, f"{run.run_id}/warm-up/{index}", stamp, index)


async def update(run: Run, parts: Parts, batch: pa.Table, stamp: PolicyStamp) -> tuple[int, dict[str, float]]:
    """One update of the policy, and of the critic if there is one; the new version and both's metrics."""
    batch_id = run.batch_id(stamp)
    if parts.critic:  # saved before the policy, whose turn comes while it still is the version to save
        await run.finish_checkpoint()
    training = [parts.trainer.train(batch, batch_id, stamp)]
    if parts.critic and run.config.critic:
        training.append(parts.critic.train(batch, batch_id, stamp, stamp.version + run.config.critic.warmup_steps))
    (version, metrics), *others = await gather(training)
    return version, metrics | {name: value for _, more in others for name, value in more.items()}


async def collect(run: Run, parts: Parts, stamp: PolicyStamp) -> pa.Table:
    """The step's batch, kept before it is trained on."""
    batch, selected = await sample(run, parts, stamp, stamp.version)
    return run.record_batch(batch, stamp, parts.data.digest, selected)


async def sample(run: Run, parts: Parts, stamp: PolicyStamp, step: int) -> tuple[pa.Table, Selected]:
    """A batch of `step`: sampled from `stamp`, scored, selected, seen by the other models, and credited."""
    config, rollout = run.config, run.config.rollout
    draw = Draw(rollout.completions_per_prompt, rollout.sampling, stamp, step, config.advantage.needs_baseline)
    # A warm-up of the critic has steps beyond the run's, and learns of no more outcomes than its policy's step.
    prompts = prompts_to_try(parts.data, config, step, lambda _, window: run.success_rates(stamp.version, window))
    selected = await select(
        config, prompts, lambda index, prompt: parts.collector.one(index, prompt, draw), parts.forwards.add
    )
    batch = to_table(selected.groups, mask_truncated=config.selection.overlong.mask_truncated)
    return credit(batch, config.advantage, kl_coef=run.kl_coef(stamp.version)), selected
