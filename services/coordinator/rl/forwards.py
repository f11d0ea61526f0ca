"""Runs the forward passes of the reference and the critic while other groups are still being generated."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from services.common.config.run import Config
from services.common.megatron.layout import samples_at_once
from services.common.tasks import gather
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.services.clients.trainer import Model


class Forwards:
    """Adds the outputs of the reference and the critic to groups, before they are trained on."""

    def __init__(self, models: Sequence[Model], config: Config):
        # A reference that is the policy's base model runs on the policy's ranks and has no settings of its own.
        settings = [config.models.get(model.name, config.trainer) for model in models]
        self._queues = [_Queue(model, samples_at_once(own)) for model, own in zip(models, settings, strict=True)]

    async def add(self, group: ScoredGroup) -> ScoredGroup:
        """Returns the group with one more column per model."""
        if not self._queues:
            return group
        samples = to_table([group])
        answers = await gather(queue.forward(samples) for queue in self._queues)
        columns = {queue.model.column: rows.to_pylist() for queue, rows in zip(self._queues, answers, strict=True)}
        return replace(group, columns=columns)


class _Queue:
    """Batches the forward passes of one model: each call takes all samples that arrived during the previous call."""

    def __init__(self, model: Model, min_samples: int):
        self.model, self._min_samples = model, min_samples
        self._waiting: dict[asyncio.Future[pa.ChunkedArray], pa.Table] = {}
        self._lock = asyncio.Lock()

    async def forward(self, samples: pa.Table) -> pa.ChunkedArray:
        answer: asyncio.Future[pa.ChunkedArray] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = samples
        try:
            async with self._lock:
                if not answer.done():
                    await self._compute()
            return answer.result()
        finally:
            self._waiting.pop(answer, None)

    async def _compute(self) -> None:
        taken = {answer: samples for answer, samples in self._waiting.items() if not answer.done()}
        table = pa.concat_tables(taken.values())
        # Every rank needs at least one sample, so too small a table is repeated.
        repeats = -(-self._min_samples // table.num_rows)
        rows = await self.model.forward(pa.concat_tables([table] * repeats))
        begin = 0
        for answer, samples in taken.items():
            answer.set_result(rows.slice(begin, samples.num_rows))
            begin += samples.num_rows
