"""Tests an SFT run between its data and the trainer: the data it resumes with and the scoring of held-out rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from services.common.config.sft import SftConfig
from services.common.errors import PreconditionFailed, Unavailable
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.supervised import Example, SftDataset
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from services.coordinator.sft import SftData, evaluate, train, use_rows


def example(index: int, num_tokens: int = 3) -> Example:
    """Returns an example of `num_tokens` tokens, of which the first is not trained on."""
    tokens = np.full(num_tokens, index, np.uint32)
    return Example(f"{index}", np.array([7], np.uint32), tokens, np.arange(num_tokens) > 0)


def data(*indices: int, **held_out: Sequence[Example]) -> SftData:
    order = EpochOrder(len(indices), 4, seed=0, shuffle=False)
    return SftData(SftDataset(list(map(example, indices)), order), held_out, cast(Any, None))


@pytest.fixture
def open_again(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Opens the run; can be called again after it was closed."""
    runs: list[Run] = []

    def opening(**changes: object) -> Run:
        if runs:
            runs[-1].close()
        config = SftConfig(
            name="run",
            runs_dir=tmp_path,
            model="m",
            data={"train": "x", "eval": {"a": "y"}, "samples_per_step": 4},
            trainer={"num_ranks": 3, "max_tokens_per_microbatch": 10_000},
            **(changes or {"num_epochs": 2}),
        )
        runs.append(Run(config, open_run(config)))
        return runs[-1]

    yield opening
    runs[-1].close()


def test_its_length_is_given_in_epochs_or_steps(open_again: Callable[..., Run]) -> None:
    run = open_again()
    use_rows(run, data(1, 2, 3, 4, 5))
    assert run.num_steps == 3  # 10 rows in batches of 4


async def test_it_goes_on_with_the_rows_that_it_trained_on_only(open_again: Callable[..., Run]) -> None:
    use_rows(open_again(num_steps=7), data(5, 6, 7, 8))  # and its trainer did not start
    run, rows = open_again(num_steps=7), data(1, 2, 3, 4)
    use_rows(run, rows)
    with pytest.raises(Unavailable):
        await train(run, rows, FakeTrainer())
    run = open_again(num_steps=9)
    with pytest.raises(PreconditionFailed, match=r"data\.train differs from what .*run was started with"):
        use_rows(run, data(1, 2, 4, 3))
    use_rows(run, data(1, 2, 3, 4, a=[example(5)]))
    assert run.num_steps == 9
    use_rows(open_again(num_steps=9), data(1, 2, 3, 4, a=[example(5)]))
    with pytest.raises(PreconditionFailed, match=r"data\.eval\.a differs from what .*run was started with"):
        use_rows(open_again(num_steps=9), data(1, 2, 3, 4, a=[example(6)]))


class FakeTrainer:
    """A trainer for which the loss of every token is its id, and whose first answer about a step is lost."""

    def __init__(self) -> None:
        self.batches: list[pa.Table] = []
        self.opened = SimpleNamespace(version=1)

    async def train(self, *args: object) -> None:
        raise Unavailable("no answer")

    async def nll(self, batch: pa.Table) -> tuple[float, int]:
        self.batches.append(batch)
        tokens = np.concatenate(batch["tokens"].to_numpy())
        mask = np.concatenate(batch["loss_mask"].to_numpy())
        return float(tokens[mask].sum()), int(mask.sum())


async def test_every_held_out_row_counts_once_on_any_number_of_ranks(open_again: Callable[..., Run]) -> None:
    run, trainer = open_again(), FakeTrainer()
    # Five rows, four at once, three ranks: batches of 6 and 3.
    rows = [example(index, num_tokens) for index, num_tokens in ((1, 2), (2, 3), (3, 2), (4, 2), (5, 4))]
    await evaluate(run, {"a": rows}, trainer, 0)
    assert [batch.num_rows for batch in trainer.batches] == [6, 3]
    (evaluated,) = run.record.evaluations()
    mean = (1 + 2 * 2 + 3 + 4 + 3 * 5) / 8
    assert evaluated["eval/a/nll"] == pytest.approx(mean, rel=1e-12)
    assert evaluated["eval/a/perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)


def test_it_goes_on_with_the_same_config_only(open_again: Callable[..., Run]) -> None:
    open_again(num_steps=7)
    open_again(num_steps=7, seed=1).record.ledger.record(Kind.FINISHED, 1)  # no step was done before
    with pytest.raises(PreconditionFailed, match="another seed "):
        open_again(num_steps=7)
    open_again(num_steps=9, seed=1)
