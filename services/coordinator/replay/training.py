"""Trains policy and critic again on the recorded batches, from the newest checkpoint before a step."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.coordinator.clients.trainer import Model, Trainer
from services.coordinator.replay.record import Batch, Difference, Record, compare
from services.coordinator.rl.metrics import batch_metrics
from services.coordinator.rl.publishing import weight_group
from services.coordinator.runs.resume import CRITIC_CHECKPOINTS
from services.coordinator.runs.run import Run


async def replay_training(
    run: Run, record: Record, step: int, trainer: Trainer, say: Callable[[str], None]
) -> tuple[int, list[Difference]]:
    """Trains all versions up to `step` again. Returns the number of values compared and the differences.

    Compares the weights of every version by their content digest, and the metrics of `step`.
    """
    version = await trainer.open(run.run_id, run.resume_from)
    # Publishes to a group without receivers, to get a stamp of the weights, which training requires.
    epoch = run.record.next_epoch(0)
    await trainer.join(weight_group(run, trainer.opened, epoch, 0))
    stamp, differences, compared = await trainer.send(epoch, version), [], 0
    while True:
        if digest := record.digest(version):
            compared += 1
            name = f"weights of version {version}"
            differences += compare({name: digest}, {name: stamp.digest})
        if version == step:
            return compared, differences
        batch = record.batch(version + 1)
        differences += batch.differences
        say(f"training on the batch of step {version + 1}")
        version, metrics = await trainer.train(_with_stamp(stamp, batch), run.batch_id(stamp.version), stamp)
        stamp = await trainer.send(epoch, version)
        if version == step:
            now = batch_metrics(batch.samples) | {f"train/{name}": value for name, value in metrics.items()}
            now = {name: value for name, value in now.items() if not name.endswith("_s")}  # without timings
            compared += len(now)
            differences += compare(record.metrics(step), now)


def _with_stamp(stamp: PolicyStamp, batch: Batch) -> pa.Table:
    """Returns the samples with `stamp`, which the trainer requires; the recorded stamp is another if weights differ."""
    samples = batch.samples
    for name, value in (("policy_version", stamp.version), ("policy_digest", stamp.digest)):
        index = samples.schema.get_field_index(name)
        field = samples.schema.field(index)
        samples = samples.set_column(index, field, pa.array([value] * samples.num_rows, field.type))
    return samples


# Suffix of a checkpoint's tensor files. Its other files contain random names, so they cannot be compared.
_TENSORS = ".distcp"


async def replay_critic(
    run: Run, record: Record, step: int, critic: Model, say: Callable[[str], None]
) -> tuple[int, list[Difference]]:
    """Trains the critic of `step` again. Returns the number of values compared and the differences.

    Compares the metrics of every step from the checkpoint on and, if the run kept the critic's checkpoint of `step`,
    the final weights and optimizer state.
    """
    assert run.config.critic
    start, warmup_steps = record.critic_start(step - 1), run.config.critic.warmup_steps
    assert start, "the caller has checked"
    await critic.open(run.run_id, start[1])
    differences, compared = [], 0
    for version in range(start[0], step):
        batch = record.batch(version + 1)
        differences += batch.differences
        say(f"training the critic on the batch of step {version + 1}")
        sampled_from = batch.samples.slice(0, 1).to_pylist()[0]
        stamp = PolicyStamp(version=sampled_from["policy_version"], digest=sampled_from["policy_digest"])
        _, metrics = await critic.train(batch.samples, run.batch_id(stamp.version), stamp, version + warmup_steps)
        now = {f"train/{name}": value for name, value in metrics.items()}
        compared += len(now)
        differences += compare(record.metrics(version + 1), now, f"step {version + 1}: ")
    if recorded := record.critic_checkpoint(step):
        now = await _tensors_now(run, critic, step, step + warmup_steps)
        compared += len(now)
        differences += compare(_tensors(recorded), now, "critic's checkpoint: ")
    return compared, differences


async def _tensors_now(run: Run, critic: Model, step: int, version: int) -> dict[str, str]:
    path = (run.config.run_dir / CRITIC_CHECKPOINTS / f"step-{step:06d}").absolute()
    await critic.save(str(path), version)
    try:
        return _tensors(path)
    finally:
        await asyncio.to_thread(shutil.rmtree, path)


def _tensors(checkpoint: Path) -> dict[str, str]:
    files = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
    return {name: about["sha256"] for name, about in files.items() if name.endswith(_TENSORS)}
