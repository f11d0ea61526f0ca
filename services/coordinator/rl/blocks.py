"""Forms the blocks of a batch, which go to other models and to training while other groups are still being
generated."""

import asyncio
import math
import sys
from bisect import insort
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile

import numpy as np
import pyarrow as pa

from services.common.batches import BlockCutter
from services.common.config.layout import samples_at_once
from services.common.config.run import Config
from services.common.config.streaming import block_cutter, orders_by_length
from services.common.tasks import gather, task_group
from services.coordinator.clients.trainer import Model
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.data.prompts import Prompt


class ByPrompt:
    """Orders groups by their prompts. The next group is certain when all before it are decided."""

    def __init__(self) -> None:
        self._decided, self._next = dict[int, ScoredGroup | None](), 0

    def begin(self, place: int, prompt_id: str) -> None:
        """Does nothing, because this order does not depend on the groups that have begun."""

    def decide(self, place: int, group: ScoredGroup | None) -> list[ScoredGroup]:
        """Takes the group at `place` in the order of prompts, None if it is not trained on. Returns what comes next."""
        self._decided[place] = group
        certain: list[ScoredGroup | None] = []
        while self._next in self._decided:
            certain.append(self._decided.pop(self._next))
            self._next += 1
        return [useful for useful in certain if useful]


class ByLength:
    """Orders groups by the length of their longest completion, which is about the order in which they are finished.

    The next group is certain when all groups of the batch have begun and all unfinished ones are known to be longer.
    """

    def __init__(self, num_groups: int, lengths: Mapping[str, int]):
        """Creates the order of `num_groups` groups; `lengths` has a lower bound of each one's length, by prompt id."""
        self._num_to_begin, self._lengths = num_groups, lengths
        self._unfinished: dict[int, str] = {}
        self._waiting: list[tuple[int, int, ScoredGroup]] = []  # with length and index, which is unique

    def begin(self, place: int, prompt_id: str) -> None:
        self._unfinished[place] = prompt_id
        self._num_to_begin -= 1

    def decide(self, place: int, group: ScoredGroup | None) -> list[ScoredGroup]:
        del self._unfinished[place]
        if group:
            insort(self._waiting, (*by_length(group), group))
        if self._num_to_begin:
            return []
        least = min((self._lengths.get(prompt_id, 0) for prompt_id in self._unfinished.values()), default=math.inf)
        # Not `<=`: an unfinished group that ends with this length may have a lower index, and then comes first.
        certain = [group for _, _, group in takewhile(lambda waiting: waiting[0] < least, self._waiting)]
        del self._waiting[: len(certain)]
        return certain


def by_length(group: ScoredGroup) -> tuple[int, int]:
    return group.length, group.index


# More blocks begin to train earlier, but each has fewer samples to fill micro-batches with.
_BLOCKS_PER_STEP = 8

# Is called with each block of groups, in the order of the batch, once every model has answered.
TakeBlock = Callable[[Sequence[ScoredGroup]], None]


class BlockMaker:
    """Sends the groups of a batch in blocks, in its order, to every model that must see them before training.

    Only that order decides which samples share a block, and not timing, because the results of a forward depend, in
    their last bits, on the samples that are packed together.
    """

    def __init__(self, models: Sequence[Model], config: Config, lengths: dict[str, int]):
        """Creates the forwards of a run. The replicas' client writes the tokens of groups so far to `lengths`."""
        # A reference that is the policy's base model runs on the policy's ranks and has no settings of its own.
        settings = [config.models.get(model.name, config.trainer) for model in models]
        self._models = {model: samples_at_once(own) for model, own in zip(models, settings, strict=True)}
        self._turns = {model: asyncio.Lock() for model in models}
        # Engines that share GPUs with these models must have generated all groups first.
        self.starts_at_end = config.takes_turns
        self.num_wanted, self._lengths = config.data.prompts_per_step, lengths
        self._config, self._orders_by_length = config, orders_by_length(config)
        at_once = -(-max(self._models.values(), default=1) // config.rollout.completions_per_prompt)
        self._groups_per_block = max(at_once, -(-self.num_wanted // _BLOCKS_PER_STEP))

    @asynccontextmanager
    async def begin(self, take: TakeBlock | None = None) -> AsyncGenerator["BlocksOfBatch", None]:
        """Yields the forwards of one batch. `take` gets each block. A failure of a forward cancels the `with` block.

        Raises:
            LockstepError: As a model's forward.
        """
        self._lengths.clear()
        order = ByLength(self.num_wanted, self._lengths) if self._orders_by_length else ByPrompt()
        # A batch that is trained on as a whole is cut by groups: other models see it in blocks all the same.
        cutter = block_cutter(self._config) or BlockCutter(sys.maxsize, self._groups_per_block)
        async with task_group() as tasks:
            yield BlocksOfBatch(self, tasks, order, cutter, take or (lambda _: None))

    def in_order(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Returns `groups`, which are in the order of prompts, in the order of the batch."""
        return sorted(groups, key=by_length) if self._orders_by_length else groups

    async def columns(self, groups: Sequence[ScoredGroup]) -> list[dict[str, list[np.ndarray | bytes]]]:
        """Returns, for each group, every model's results for its samples, by column of the batch."""
        if not self._models:
            return [{} for _ in groups]
        samples = to_table(groups)
        answers = await gather(self._forward(model, samples) for model in self._models)
        columns = {name: [_values(row) for row in rows] for answer in answers for name, rows in answer.items()}
        begins = accumulate((len(group.rows) for group in groups), initial=0)
        return [{name: rows[begin:end] for name, rows in columns.items()} for begin, end in pairwise(begins)]

    async def _forward(self, model: Model, samples: pa.Table) -> dict[str, pa.ChunkedArray]:
        # Every rank needs a sample, so some are computed twice.
        repeats = -(-self._models[model] // samples.num_rows)
        async with self._turns[model]:
            columns = await model.forward(pa.concat_tables([samples] * repeats))
        return {name: rows.slice(0, samples.num_rows) for name, rows in columns.items()}


def _values(row: pa.Scalar) -> np.ndarray | bytes:
    return row.as_py() if isinstance(row, pa.LargeBinaryScalar) else row.values.to_numpy()


class BlocksOfBatch:
    """Runs the forwards of one batch. A block starts as soon as its groups are certain."""

    def __init__(
        self,
        maker: BlockMaker,
        tasks: asyncio.TaskGroup,
        order: ByPrompt | ByLength,
        cutter: BlockCutter,
        take: TakeBlock,
    ):
        self._maker, self._tasks, self._order, self._cutter, self._take = maker, tasks, order, cutter, take
        self._num_left = maker.num_wanted
        self._may_start = asyncio.Event()
        if not maker.starts_at_end:
            self._may_start.set()
        self._block: list[ScoredGroup] = []
        self._running: list[asyncio.Task[list[ScoredGroup]]] = []

    def begin(self, place: int, prompt: Prompt) -> None:
        self._order.begin(place, prompt.prompt_id)

    def decide(self, place: int, group: ScoredGroup | None) -> None:
        # With over-sampling, more groups may become certain than the batch has.
        for useful in self._order.decide(place, group)[: self._num_left]:
            self._num_left -= 1
            self._block.append(useful)
            if self._cutter.ends_with(useful.num_tokens):
                self._start()

    async def complete(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns `groups`, which were all decided, with the columns of every model."""
        self._start()
        self._may_start.set()
        completed = {group.index: group for block in self._running for group in await block}
        return [completed[group.index] for group in groups]

    def _start(self) -> None:
        block, self._block = self._block, []
        if block:
            self._running.append(self._tasks.create_task(self._run(block, self._running[-1:])))

    async def _run(
        self, block: Sequence[ScoredGroup], before: Sequence[asyncio.Task[list[ScoredGroup]]]
    ) -> list[ScoredGroup]:
        await self._may_start.wait()
        columns = await self._maker.columns(block)
        for earlier in before:  # `take` gets the blocks in order, in whichever order the models answer
            await earlier
        whole = [replace(group, columns=own) for group, own in zip(block, columns, strict=True)]
        self._take(whole)
        return whole
