"""Trains the policy again on the recorded batches, from the newest checkpoint before a step."""

from collections.abc import Callable

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.coordinator.replay.record import Batch, Difference, Record, compare
from services.coordinator.rl.metrics import batch_metrics
from services.coordinator.rl.publishing.publication import weight_group
from services.coordinator.runs.run import Run
from services.coordinator.services.clients.trainer import Trainer


async def replay_training(
    run: Run, record: Record, step: int, trainer: Trainer, say: Callable[[str], None]
) -> tuple[int, list[Difference]]:
    """Trains all versions up to `step` again. Returns the number of values compared and the differences.

    Compares the weights of every version by their content digest, and the metrics of `step`.

    Raises:
        NotFound: The samples of one of the steps were not kept.
    """
    version = await trainer.open(run.run_id, run.resume_from)
    stamps = _Stamps(run, trainer)
    stamp, found, compared = await stamps.of(version), [], 0
    while True:
        digest = record.digest(version)
        if digest:
            compared += 1
            found += compare({_name(version): digest}, {_name(version): stamp.digest})
        if version == step:
            return compared, found
        batch = record.batch(version + 1)
        found += batch.differences
        say(f"training on the batch of step {version + 1}")
        version, metrics = await trainer.train(_with_stamp(stamp, batch), run.batch_id(stamp), stamp)
        stamp = await stamps.of(version)
        if version == step:
            now = batch_metrics(batch.samples) | {f"train/{name}": value for name, value in metrics.items()}
            now = {name: value for name, value in now.items() if not name.endswith("_s")}  # without timings
            compared += len(now)
            found += compare(record.metrics(step), now)


class _Stamps:
    """Publishes the policy to a group without receivers, to get a stamp of its weights, which training requires."""

    def __init__(self, run: Run, trainer: Trainer):
        self._run, self._trainer = run, trainer
        self._epoch = 0

    async def of(self, version: int) -> PolicyStamp:
        """Returns the stamp of the weights that the trainer holds."""
        if not self._epoch:
            await self._join()
        return await self._trainer.send(self._epoch, version)

    async def _join(self) -> None:
        self._epoch = self._run.record.next_epoch(0)
        await self._trainer.join(weight_group(self._run, self._trainer.opened, self._epoch, 0))


def _with_stamp(stamp: PolicyStamp, batch: Batch) -> pa.Table:
    """Returns the samples with `stamp`, which the trainer requires; the recorded stamp is another if weights differ."""
    samples = batch.samples
    for name, value in (("policy_version", stamp.version), ("policy_digest", stamp.digest)):
        index = samples.schema.get_field_index(name)
        field = samples.schema.field(index)
        samples = samples.set_column(index, field, pa.array([value] * samples.num_rows, field.type))
    return samples


def _name(version: int) -> str:
    return f"weights of version {version}"
