"""Forms the blocks of a batch, in which other models see it and it is trained on while other groups still generate."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pyarrow as pa

from services.common.config.run import Config
from services.common.config.streaming import groups_per_block
from services.common.megatron.layout import samples_at_once
from services.common.tasks import gather, task_group
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.services.clients.trainer import Model

_BLOCKS_PER_STEP = 8

# Told of each block of groups, in the order of prompts, once every model has answered.
TakeBlock = Callable[[Sequence[ScoredGroup]], None]


class Forwards:
    """Sends the groups of a batch in blocks, in prompt order, to every model that must see them before training.

    Which samples share a block follows from their order alone. Timing must not decide it, because the numbers of a
    forward depend, in their last bits, on what is packed together.
    """

    def __init__(self, models: Sequence[Model], config: Config):
        # A reference that is the policy's base model runs on the policy's ranks and has no settings of its own.
        settings = [config.models.get(model.name, config.trainer) for model in models]
        self._models = {model: samples_at_once(own) for model, own in zip(models, settings, strict=True)}
        self._turns = {model: asyncio.Lock() for model in models}
        # Engines that share GPUs with these models must have generated all groups first.
        self.starts_at_end = config.placement == "colocated"
        self._num_wanted = config.data.prompts_per_step
        at_once = -(-max(self._models.values(), default=1) // config.rollout.completions_per_prompt)
        self._block_size = groups_per_block(config) or max(at_once, -(-self._num_wanted // _BLOCKS_PER_STEP))

    @asynccontextmanager
    async def of_batch(self, take: TakeBlock | None = None) -> AsyncGenerator["BatchForwards", None]:
        """Yields the forwards of one batch; a failure of one cancels the block. `take` gets the blocks.

        Raises:
            LockstepError: As a model's forward.
        """
        async with task_group() as tasks:
            yield BatchForwards(self, tasks, self._num_wanted, self._block_size, take or (lambda _: None))

    async def columns(self, groups: Sequence[ScoredGroup]) -> list[dict[str, list[list[float]]]]:
        """Returns, for each group, what every model says of its samples, by column of the batch."""
        if not self._models:
            return [{} for _ in groups]
        samples = pa.concat_tables(to_table([group]) for group in groups)
        names = [model.column for model in self._models]
        answers = await gather(self._forward(model, samples) for model in self._models)
        begin = 0
        found: list[dict[str, list[list[float]]]] = []
        for group in groups:
            size = len(group.completions)
            parts = (rows.slice(begin, size).to_pylist() for rows in answers)
            found.append(dict(zip(names, parts, strict=True)))
            begin += size
        return found

    async def _forward(self, model: Model, samples: pa.Table) -> pa.ChunkedArray:
        # Every rank needs a sample, so some are computed twice.
        repeats = -(-self._models[model] // samples.num_rows)
        async with self._turns[model]:
            rows = await model.forward(pa.concat_tables([samples] * repeats))
        return rows.slice(0, samples.num_rows)


class BatchForwards:
    """The forwards of one batch. Blocks start as soon as the places before them are decided."""

    def __init__(self, forwards: Forwards, tasks: asyncio.TaskGroup, num_wanted: int, block_size: int, take: TakeBlock):
        self._forwards, self._tasks, self._take = forwards, tasks, take
        self._num_wanted, self._block_size = num_wanted, block_size
        self._decided: dict[int, ScoredGroup | None] = {}
        self._num_passed = self._num_useful = 0
        self._may_start = asyncio.Event()
        if not forwards.starts_at_end:
            self._may_start.set()
        self._block: list[ScoredGroup] = []
        self._running: list[asyncio.Task[list[ScoredGroup]]] = []

    def decide(self, place: int, group: ScoredGroup | None) -> None:
        """Takes note of the group at `place` in the order of prompts; None if it is not trained on."""
        self._decided[place] = group
        while self._num_passed in self._decided and self._num_useful < self._num_wanted:
            useful = self._decided[self._num_passed]
            self._num_passed += 1
            if useful is not None:
                self._num_useful += 1
                self._block.append(useful)
                if len(self._block) == self._block_size:
                    self._start()

    async def complete(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns `groups`, which were all decided, with the columns of every model."""
        self._start()
        self._may_start.set()
        found = {group.index: group for block in self._running for group in await block}
        return [found[group.index] for group in groups]

    def _start(self) -> None:
        block, self._block = self._block, []
        if block:
            before = self._running[-1] if self._running else None
            self._running.append(self._tasks.create_task(self._run(block, before)))

    async def _run(
        self, block: Sequence[ScoredGroup], before: asyncio.Task[list[ScoredGroup]] | None
    ) -> list[ScoredGroup]:
        await self._may_start.wait()
        columns = await self._forwards.columns(block)
        if before is not None:
            await before
        whole = [replace(group, columns=found) for group, found in zip(block, columns, strict=True)]
        self._take(whole)
        return whole
